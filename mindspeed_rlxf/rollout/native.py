"""Generate with the Megatron model itself: KV cache, continuous batching, no wasted row.

Rows that finish leave the batch at once and waiting prompts take their place, so the number of
tokens computed is the number of tokens produced.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from mindspeed_rlxf import device
from mindspeed_rlxf.config.memory import PREFILL_TOKENS, kv_cache_rows
from mindspeed_rlxf.config.rules.tensor_parallel import groups_per_rank
from mindspeed_rlxf.models.attention import PackedSequences
from mindspeed_rlxf.models.heads import full_logits, token_log_probs
from mindspeed_rlxf.models.transformer import TransformerModel
from mindspeed_rlxf.rollout.kv_cache import CacheShape, DecodeStep, KvCache, Prefill
from mindspeed_rlxf.rollout.protocol import (
    FinishReason,
    GenerationRequest,
    GenerationResult,
    GenerationStats,
)
from mindspeed_rlxf.rollout.sampling import SamplingSettings, choose_tokens, uniform_numbers
from mindspeed_rlxf.rollout.weights import WeightSource


@dataclass
class Growing:
    """One sample during its generation."""

    request: GenerationRequest
    uniforms: np.ndarray  # [max_new_tokens] fp64
    tokens: list[int] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)

    @classmethod
    def begin(cls, request: GenerationRequest) -> Growing:
        settings = request.settings
        count = settings.max_new_tokens if settings.do_sample else 0
        return cls(request, uniform_numbers(request.seed, request.sample_id, count))

    @property
    def prompt(self) -> np.ndarray:
        """[prompt] int64"""
        return self.request.prompt

    @property
    def length(self) -> int:
        return len(self.prompt) + len(self.tokens)

    @property
    def is_finished(self) -> bool:
        settings = self.request.settings
        full = len(self.tokens) == settings.max_new_tokens
        return full or FinishReason.of(self.tokens, settings) is FinishReason.STOP

    def result(self, weights_version: int) -> GenerationResult:
        reason = FinishReason.of(self.tokens, self.request.settings)
        place = self.request.place
        return GenerationResult(place, self.tokens, self.log_probs, reason, weights_version)


class NativeRollout:
    """One tensor-parallel replica; all its ranks run the same steps on the same prompts."""

    def __init__(
        self, source: WeightSource, max_rows: int | None = None, memory: int | None = None
    ) -> None:
        """max_rows: sequences that grow at the same time; None = as many as fit (`kv_cache_rows`).
        memory: bytes of the device that count; None = all of them.
        """
        self.source, self.max_rows, self.memory = source, max_rows, memory
        self._stats = GenerationStats()
        self._version: int | None = None  # None = the weights are not whole
        self._awake = False
        self._device = next(source.module.parameters()).device

    @property
    def model(self) -> TransformerModel:
        return self.source.module

    def update_weights(self, tensors: Iterable[tuple[str, Tensor]], version: int) -> None:
        with self.replacing_weights(version):
            self.source.load(tensors)

    @contextlib.contextmanager
    def replacing_weights(self, version: int) -> Iterator[None]:
        """Set the version after the block, which replaces the weights; none if it fails."""
        self._version = None
        yield
        self._version = version

    @property
    def weights_version(self) -> int:
        assert self._version is not None, "the rollout has not received its weights"
        return self._version

    def stats(self) -> GenerationStats:
        return self._stats

    def wake(self) -> None:
        self.source.wake()
        self._awake = True

    def sleep(self) -> None:
        """Free the weights of the source; the KV cache ends with each `generate`."""
        self._awake = False
        self.source.sleep()

    @contextlib.contextmanager
    def _computing(self) -> Iterator[None]:
        """Activate the parallel groups of the module.

        Results are returned outside the block, since their receiver may run other roles.
        """
        assert self._awake, "the rollout sleeps"
        with torch.no_grad(), self.source.active():
            yield

    def generate(self, requests: Sequence[GenerationRequest]) -> Iterator[GenerationResult]:
        """Generate as `RolloutEngine.generate` says; settings may differ between requests."""
        self.model.eval()
        self._stats, version = GenerationStats(), self.weights_version
        waiting = deque(map(Growing.begin, requests))
        if not waiting:
            return
        cache = self._new_cache(list(waiting))
        active: list[Growing] = []
        while waiting or active:
            finished: list[Growing] = []
            with self._computing():
                assert self.weights_version == version, "weights changed during a generation"
                while not finished:
                    active = self._step(waiting, active, cache)
                    active, finished = self._retire(active, cache)
            for sequence in finished:
                yield sequence.result(version)

    def _step(
        self, waiting: deque[Growing], active: list[Growing], cache: KvCache
    ) -> list[Growing]:
        """Take in waiting prompts if slots are free, else decode; return the active sequences."""
        if waiting and len(active) < cache.slots:
            admitted = self._admit(waiting, cache.slots - len(active))
            self._prefill(admitted, len(active), cache)
            return active + admitted
        self._decode(active, cache)
        return active

    def score(
        self,
        prompts: Sequence[np.ndarray],
        responses: Sequence[Sequence[int]],
        temperature: float = 1.0,
    ) -> list[list[float]]:
        """Score as `RolloutEngine.score` says, several sequences in one packed pass."""
        self.model.eval()
        self._stats = GenerationStats()
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
        return log_probs

    def _score_pack(
        self, pack: list[tuple[np.ndarray, Sequence[int]]], temperature: float
    ) -> list[list[float]]:
        """Compute the log-probs of each response's tokens in one packed forward pass.

        pack: (prompt, response) of each sequence; its last token is left out, it predicts nothing
        """
        prompts = [len(prompt) for prompt, _ in pack]
        lengths = [p + len(response) - 1 for p, (_, response) in zip(prompts, pack, strict=True)]
        ids = [np.concatenate((prompt, response))[:-1] for prompt, response in pack]
        starts = np.cumsum([0, *lengths[:-1]])
        places = [
            np.arange(start + p - 1, start + n)
            for start, p, n in zip(starts, prompts, lengths, strict=True)
        ]
        token_ids, place, position, label = (
            torch.from_numpy(np.concatenate(parts)).to(self._device)
            for parts in (
                ids,
                places,
                [np.arange(n) for n in lengths],
                [np.asarray(response, dtype=np.int64) for _, response in pack],
            )
        )
        hidden = self.model(token_ids[None, :], position, PackedSequences(lengths=tuple(lengths)))
        self._stats.prompt_tokens += sum(lengths)
        found, _ = token_log_probs(
            hidden.squeeze(1)[place],
            self.model.output_weight,
            label,
            self.model.architecture.vocab_size,
            self.model.tp_group,
            temperature,
        )
        return [part.tolist() for part in found.split([len(response) for _, response in pack])]

    def _new_cache(self, sequences: list[Growing]) -> KvCache:
        """Make a KV cache with a slot for as many of the sequences as fit into the memory."""
        config = self.model.config
        longest = max(len(s.prompt) for s in sequences)
        longest_response = max(s.request.settings.max_new_tokens for s in sequences)
        shape = CacheShape(
            num_layers=config.num_layers,
            groups=groups_per_rank(config.num_query_groups, config.tensor_model_parallel_size),
            max_length=longest + longest_response,
            head_dim=config.kv_channels,
            dtype=config.params_dtype,
        )
        # From the total and not from what is free, so that a run repeats itself.
        memory = None if self.max_rows else self.memory or _memory_of_one_process()
        slots = kv_cache_rows(self.max_rows, len(sequences), shape.slot_bytes, memory)
        agreed = torch.tensor(slots, device=self._device)
        self._as_first_rank(agreed)
        return KvCache(shape, int(agreed), self._device)

    def _as_first_rank(self, values: Tensor) -> None:
        """Broadcast the values of the first rank: ranks that differ would wait for ever."""
        group = self.model.tp_group
        if group.size() > 1:
            dist.broadcast(values, dist.get_global_rank(group, 0), group=group)

    def _admit(self, waiting: deque[Growing], room: int) -> list[Growing]:
        """Take prompts off the front of `waiting`: at most `room`, of PREFILL_TOKENS tokens in all.

        The first prompt is taken even when it is longer.
        """
        admitted: list[Growing] = []
        tokens = 0
        while waiting and len(admitted) < room:
            tokens += len(waiting[0].prompt)
            if admitted and tokens > PREFILL_TOKENS:
                break
            admitted.append(waiting.popleft())
        return admitted

    def _prefill(self, sequences: list[Growing], first_slot: int, cache: KvCache) -> None:
        """Fill the slots from `first_slot` on with the prompts; choose the first token of each."""
        lengths = torch.tensor([len(s.prompt) for s in sequences])
        token_ids = torch.from_numpy(np.concatenate([s.prompt for s in sequences]))
        position = torch.cat([torch.arange(int(n)) for n in lengths]).to(self._device)
        slot = torch.repeat_interleave(torch.arange(len(sequences)), lengths) + first_slot
        attend = Prefill(
            lengths=tuple(lengths.tolist()),
            cache=cache,
            slot=slot.to(self._device),
            position=position,
        )
        hidden = self.model(token_ids[None, :].to(self._device), position, attend).squeeze(1)
        self._stats.prompt_tokens += len(token_ids)
        self._append(sequences, hidden[(lengths.cumsum(0) - 1).to(self._device)])

    def _decode(self, active: list[Growing], cache: KvCache) -> None:
        """Add one token to each active sequence; sequence `i` is in slot `i` of the cache."""
        token_ids = torch.tensor([s.tokens[-1] for s in active], device=self._device)
        position = torch.tensor([s.length - 1 for s in active], device=self._device)
        attend = DecodeStep(cache=cache, position=position)
        hidden = self.model(token_ids[None, :], position, attend).squeeze(1)
        self._stats.decoded_tokens += len(active)
        self._append(active, hidden)

    def _append(self, sequences: list[Growing], hidden: Tensor) -> None:
        """Choose and append the next token of each sequence.

        hidden: its last state, [rows, hidden]
        """
        logits = full_logits(
            hidden,
            self.model.output_weight,
            self.model.architecture.vocab_size,
            self.model.tp_group,
        )
        tokens, log_probs = _choose(logits, sequences)
        self._as_first_rank(tokens)
        self._stats.sampled_tokens += len(sequences)
        for sequence, token, log_prob in zip(
            sequences, tokens.tolist(), log_probs.tolist(), strict=True
        ):
            sequence.tokens.append(token)
            sequence.log_probs.append(log_prob)

    def _retire(self, active: list[Growing], cache: KvCache) -> tuple[list[Growing], list[Growing]]:
        """Return active and finished sequences; the last active ones move into the freed slots."""
        kept, finished = list(active), []
        for slot in reversed(range(len(kept))):
            sequence = kept[slot]
            if not sequence.is_finished:
                continue
            finished.append(sequence)
            last = kept.pop()
            if last is not sequence:
                kept[slot] = last
                cache.move(len(kept), slot, last.length - 1)
        return kept, finished


def _choose(logits: Tensor, sequences: Sequence[Growing]) -> tuple[Tensor, Tensor]:
    """Choose next tokens [rows] int64, with log-probs [rows] fp32, by the settings of each row."""
    by_settings: dict[SamplingSettings, list[int]] = {}
    for row, sequence in enumerate(sequences):
        by_settings.setdefault(sequence.request.settings, []).append(row)
    if len(by_settings) == 1:
        return _choose_alike(logits, sequences)
    tokens = torch.empty(len(sequences), dtype=torch.int64, device=logits.device)
    log_probs = torch.empty(len(sequences), dtype=torch.float32, device=logits.device)
    for rows in by_settings.values():
        found = _choose_alike(logits[rows], [sequences[row] for row in rows])
        tokens[rows], log_probs[rows] = found
    return tokens, log_probs


def _choose_alike(logits: Tensor, sequences: Sequence[Growing]) -> tuple[Tensor, Tensor]:
    """Choose next tokens of rows with the same settings."""
    uniforms = [s.uniforms[len(s.tokens)] if len(s.uniforms) else 0.0 for s in sequences]
    return choose_tokens(
        logits,
        torch.tensor(uniforms, dtype=torch.float64),
        torch.tensor([len(s.tokens) for s in sequences], device=logits.device),
        sequences[0].request.settings,
    )


def _memory_of_one_process() -> int:
    """Return bytes of memory; processes on a CPU get equal shares of it."""
    on_cpu = device.current_device().type == "cpu"
    return device.memory_total() // (dist.get_world_size() if on_cpu else 1)
