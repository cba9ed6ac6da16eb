"""The rollout engine that generates with the Megatron model itself, and scores given responses.

`generation.py` has the generation loop.
"""

import contextlib
from collections import deque
from collections.abc import Iterable, Iterator, Sequence

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from mindspeed_rlxf import device
from mindspeed_rlxf.config.generation_memory import (
    PREFILL_TOKENS,
    Capacities,
    kv_cache_rows,
    kv_cache_tokens,
)
from mindspeed_rlxf.models.attention import PackedSequences
from mindspeed_rlxf.models.heads import token_log_probs
from mindspeed_rlxf.models.transformer import TransformerModel
from mindspeed_rlxf.rollout.generation import (
    Generation,
    Limits,
    broadcast_from_first,
    cache_shape,
)
from mindspeed_rlxf.rollout.kv_cache import KeptRow
from mindspeed_rlxf.rollout.rollout_engine import (
    GenerationRequest,
    GenerationResult,
    GenerationStats,
)
from mindspeed_rlxf.rollout.weights import WeightSource


class NativeRollout:
    """One rank in a tensor-parallel replica; its ranks run the same steps on the same prompts."""

    def __init__(
        self,
        source: WeightSource,
        max_rows: int | None = None,
        memory: int | None = None,
        steps: int | None = None,
        capacities: Capacities | None = None,
        first_rank_draws: bool = False,
        decode_graphs: bool = False,
    ) -> None:
        """Make a sleeping engine without weights.

        Args:
            source: Provides the module and its weights.
            max_rows: Most sequences in the batch; None = as many as fit (`kv_cache_rows`).
            memory: Device memory for planning the KV cache, in bytes; None = all.
            steps: Decode steps between two reads; a row that ends in between is still computed.
                None = 1 on CPU, where reading costs nothing, else 8.
            capacities: Sizes of every generation; requests may then be added while others are
                unfinished. None = those of the requests at hand.
            first_rank_draws: See `rollout.first_rank_draws`.
            decode_graphs: See `rollout.decode_graphs`; on CUDA only.
        """
        self.source, self.max_rows, self.memory = source, max_rows, memory
        self.capacities = capacities
        self.first_rank_draws = first_rank_draws
        self.decode_graphs = decode_graphs
        self.model: TransformerModel = source.module
        self._stats = GenerationStats()
        self._generation: Generation | None = None  # None = nothing has begun
        self._added: list[GenerationRequest] = []  # not given to the generation yet
        self._kept_rows: dict[int, KeptRow] = {}  # of these weights, for turns that follow
        self._version: int | None = None  # None = no weights, or only some were replaced
        self._awake = False
        self._device = next(source.module.parameters()).device
        on_cpu = self._device.type == "cpu"
        self.steps = steps or (1 if on_cpu else 8)

    def update_weights(self, tensors: Iterable[tuple[str, Tensor]], version: int) -> None:
        """Replace all weights; after an error the engine has no version and cannot generate."""
        self._version = None
        self._kept_rows.clear()
        self.source.load(tensors)
        self._version = version

    @property
    def weights_version(self) -> int:
        """Version of the loaded weights."""
        assert self._version is not None, "the rollout has not received its weights"
        return self._version

    def stats(self) -> GenerationStats:
        """Return the counts for the current or last call."""
        return self._stats

    def wake(self) -> None:
        """Bring the weights to the device."""
        self.source.wake()
        self._awake = True

    def sleep(self) -> None:
        """Free the source's copies."""
        self._awake = False
        self._kept_rows.clear()
        self.source.sleep()

    @contextlib.contextmanager
    def _computing(self) -> Iterator[None]:
        assert self._awake, "the rollout sleeps"
        with torch.no_grad(), self.source.groups.active():
            yield

    def generate(self, requests: Sequence[GenerationRequest]) -> Iterator[GenerationResult]:
        """Generate as `RolloutEngine.generate` says; settings may differ between requests."""
        assert not self._added and self._generation is None, "other requests are unfinished"
        self.add(requests)
        try:
            yield from self.advance(None)
        finally:  # of an iterator that was closed early, or failed
            self._added, self._generation = [], None

    def add(self, requests: Sequence[GenerationRequest]) -> None:
        """Append requests to the queue, as `StepwiseEngine.add` says."""
        is_fixed = self.capacities is not None or self._generation is None
        assert is_fixed, "requests are added to unfinished ones only with `capacities`"
        self._added += requests

    def advance(self, steps: int | None) -> Iterator[GenerationResult]:
        """Generate as `StepwiseEngine.advance` says.

        After the last result, or when the iterator is closed after the first, computes this rank's
        experts for other ranks until all have finished. A generation ends with its last sample: the
        next one has an empty cache, so that nothing depends on how long the engine has run.
        """
        self.model.eval()
        self._stats = GenerationStats()
        version = self.weights_version
        self.source.expert_sync.begin()
        if self._added:
            with self._computing():
                self._begin_added()
        num_steps = 0
        try:
            while self._generation is not None and num_steps != steps:
                has_same_weights = self._generation.weights_version == self.weights_version
                assert has_same_weights, "weights changed during a generation"
                with self._computing():
                    left = None if steps is None else steps - num_steps
                    finished, num_decoded = self._generation.advance(left, self._stats)
                num_steps += num_decoded
                if self._generation.is_empty:
                    self._generation = None
                for sample in finished:
                    yield sample.make_result(version)
        except GeneratorExit:  # the caller wants no more, but other ranks need this one's experts
            if self._awake:
                self._serve_other_ranks()
            raise
        self._serve_other_ranks()

    def _begin_added(self) -> None:
        """Give the added requests to the generation, or to a new one."""
        if self._generation is None:
            limits = self._choose_limits(self._added)
            self._generation = Generation(
                self.model,
                self.weights_version,
                self.source.expert_sync,
                limits,
                self.steps,
                self._kept_rows,
                self.first_rank_draws,
                self.decode_graphs,
            )
        self._generation.add(self._added)
        self._added = []

    def withdraw(self) -> list[GenerationRequest]:
        """Return the unfinished requests and drop the cache, as `StepwiseEngine.withdraw` says."""
        begun = self._generation.withdraw() if self._generation is not None else []
        requests = begun + self._added
        self._added, self._generation = [], None
        self._kept_rows.clear()
        return requests

    def _serve_other_ranks(self) -> None:
        with self._computing():
            self._stats.idle_passes = self.source.expert_sync.finish()

    def _choose_limits(self, requests: Sequence[GenerationRequest]) -> Limits:
        """Return the generation's sizes; a collective over the replica's ranks."""
        sizes = self.capacities or Capacities(
            prompt=max(len(request.prompt) for request in requests),
            response=max(request.settings.max_new_tokens for request in requests),
            samples=len(requests),
        )
        memory = None
        if not self.max_rows:
            # From the total memory, not the free memory, so that a repeated run has the same rows.
            memory = self.memory or device.memory_total() // (
                dist.get_world_size() if self._device.type == "cpu" else 1
            )
        token = cache_shape(self.model).token_bytes
        tokens = kv_cache_tokens(token, memory)
        rows = kv_cache_rows(self.max_rows, sizes.samples, sizes.prompt, sizes.response, tokens)
        agreed = torch.tensor([rows, tokens or 0], device=self._device)
        broadcast_from_first(agreed, self.model.tp_group)
        rows, tokens = agreed.tolist()
        return Limits(sizes.prompt, sizes.response, rows, tokens or None)

    def score(
        self,
        prompts: Sequence[np.ndarray],
        responses: Sequence[Sequence[int]],
        temperature: float = 1.0,
    ) -> list[list[float]]:
        """Score as `RolloutEngine.score` says, in packed passes with up to PREFILL_TOKENS tokens.

        A longer sequence has its own pass. Then computes this rank's experts for other ranks until
        all have finished.
        """
        self.model.eval()
        self._stats = GenerationStats()
        self.source.expert_sync.begin()
        log_probs: list[list[float]] = []
        waiting = deque(zip(prompts, responses, strict=True))
        while waiting:
            pack = [waiting.popleft()]
            tokens = sum(map(len, pack[0]))
            while waiting and tokens + sum(map(len, waiting[0])) <= PREFILL_TOKENS:
                tokens += sum(map(len, waiting[0]))
                pack.append(waiting.popleft())
            with self._computing():
                log_probs += self._score_pack(pack, temperature)
        self._serve_other_ranks()
        return log_probs

    def _score_pack(
        self, pack: list[tuple[np.ndarray, Sequence[int]]], temperature: float
    ) -> list[list[float]]:
        """Return the log-probs for each response's tokens, from one packed forward pass."""
        lengths: list[int] = []
        rows: list[np.ndarray] = []  # of each pair the inputs: its tokens but the last
        predicting: list[np.ndarray] = []  # indices in the pack that predict a response's tokens
        positions: list[np.ndarray] = []
        labels: list[np.ndarray] = []
        start = 0
        for prompt, response in pack:
            length = len(prompt) + len(response) - 1
            lengths.append(length)
            rows.append(np.concatenate((prompt, response))[:-1])
            predicting.append(np.arange(start + len(prompt) - 1, start + length))
            positions.append(np.arange(length))
            labels.append(np.asarray(response, dtype=np.int64))
            start += length
        token_ids, index, position, label = (
            torch.from_numpy(np.concatenate(arrays)).to(self._device)
            for arrays in (rows, predicting, positions, labels)
        )
        self.source.expert_sync.announce(len(token_ids))
        hidden = self.model(token_ids[None, :], position, PackedSequences(lengths=tuple(lengths)))
        self._stats.prompt_tokens += sum(lengths)
        log_probs, _ = token_log_probs(
            hidden.squeeze(1)[index],
            self.model.output_weight,
            label,
            self.model.architecture.vocab_size,
            self.model.tp_group,
            temperature,
            self.model.linear,
            with_entropy=False,
        )
        by_response = log_probs.split([len(response) for _, response in pack])
        return [of_response.tolist() for of_response in by_response]
