"""Generation with the Megatron model itself: KV cache, continuous batching, no wasted row.

Rows that finish leave the batch at once and waiting prompts take their place, so the number of
tokens computed is the number of tokens produced.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from mindspeed_rlxf import device
from mindspeed_rlxf.config.memory import PREFILL_TOKENS, kv_cache_rows
from mindspeed_rlxf.config.tensor_parallel import groups_per_rank
from mindspeed_rlxf.models.attention import PackedSequences
from mindspeed_rlxf.models.heads import full_logits, token_log_probs
from mindspeed_rlxf.models.transformer import TransformerModel
from mindspeed_rlxf.rollout.kv_cache import CacheShape, DecodeStep, KvCache, Prefill
from mindspeed_rlxf.rollout.sampling import SamplingSettings, choose_tokens, uniform_numbers


@dataclass
class GenerationStats:
    """Counts of one `generate`: what was computed, and what came of it."""

    prompt_tokens: int = 0  # prompt tokens run through the model
    decoded_tokens: int = 0  # response tokens run through the model
    sampled_tokens: int = 0  # next-token choices made: each is a token of a response


@dataclass
class Growing:
    """One sample while it grows."""

    index: int  # place in the caller's list
    prompt: np.ndarray  # [prompt] int64
    uniforms: np.ndarray  # [max_new_tokens] fp64
    tokens: list[int] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)

    @property
    def length(self) -> int:
        return len(self.prompt) + len(self.tokens)


class NativeRollout:
    """One tensor-parallel replica; all its ranks run the same steps on the same prompts."""

    def __init__(
        self,
        model: TransformerModel,
        settings: SamplingSettings,
        max_rows: int | None = None,
        memory: int | None = None,
    ) -> None:
        """max_rows: sequences that grow at the same time; None = as many as fit (`kv_cache_rows`).
        memory: bytes of the device that count; None = all of them.
        """
        self.model, self.settings, self.max_rows = model, settings, max_rows
        self.memory = memory
        self.stats = GenerationStats()
        self._device = next(model.parameters()).device

    @torch.no_grad()
    def generate(
        self, prompts: Sequence[np.ndarray], sample_ids: Sequence[int], seed: int
    ) -> tuple[list[list[int]], list[list[float]]]:
        """Response tokens (EOS included) and their log-probabilities, in the order of `prompts`.

        prompts: int64 arrays without padding; sample_ids: numbers that the random streams derive
        from, unique among samples that should differ.
        """
        self.model.eval()
        self.stats = GenerationStats()
        if not prompts:
            return [], []
        finished: dict[int, Growing] = {}
        waiting = deque(
            self._sequence(index, prompt, sample_id, seed)
            for index, (prompt, sample_id) in enumerate(zip(prompts, sample_ids, strict=True))
        )
        cache = self._new_cache(list(waiting))
        active: list[Growing] = []
        while waiting or active:
            if waiting and len(active) < cache.slots:
                admitted = self._admit(waiting, cache.slots - len(active))
                self._prefill(admitted, len(active), cache)
                active += admitted
            else:
                self._decode(active, cache)
            active = self._retire(active, cache, finished)
        ordered = [finished[i] for i in range(len(prompts))]
        return [s.tokens for s in ordered], [s.log_probs for s in ordered]

    @torch.no_grad()
    def score(
        self, prompts: Sequence[np.ndarray], responses: Sequence[Sequence[int]]
    ) -> list[list[float]]:
        """Log-probabilities that generation would have reported for these responses."""
        self.model.eval()
        self.stats = GenerationStats()
        log_probs: list[list[float]] = []
        waiting = deque(zip(prompts, responses, strict=True))
        while waiting:
            pack = [waiting.popleft()]
            tokens = sum(map(len, pack[0]))
            while waiting and tokens + sum(map(len, waiting[0])) <= PREFILL_TOKENS:
                tokens += sum(map(len, waiting[0]))
                pack.append(waiting.popleft())
            log_probs += self._score_pack(pack)
        return log_probs

    def _score_pack(self, pack: list[tuple[np.ndarray, Sequence[int]]]) -> list[list[float]]:
        """One packed forward; the last token of a sequence predicts nothing and stays out."""
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
        self.stats.prompt_tokens += sum(lengths)
        found, _ = token_log_probs(
            hidden.squeeze(1)[place],
            self.model.output_weight,
            label,
            self.model.architecture.vocab_size,
            self.model.tp_group,
            self.settings.logit_temperature,
        )
        return [part.tolist() for part in found.split([len(response) for _, response in pack])]

    def _sequence(self, index: int, prompt: np.ndarray, sample_id: int, seed: int) -> Growing:
        count = self.settings.max_new_tokens if self.settings.do_sample else 0
        return Growing(index, prompt, uniform_numbers(seed, sample_id, count))

    def _new_cache(self, sequences: list[Growing]) -> KvCache:
        config = self.model.config
        longest = max(len(s.prompt) for s in sequences)
        shape = CacheShape(
            num_layers=config.num_layers,
            groups=groups_per_rank(config.num_query_groups, config.tensor_model_parallel_size),
            max_length=longest + self.settings.max_new_tokens,
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
        """Give all ranks the values of the first; ranks that differ would wait for ever."""
        group = self.model.tp_group
        if group.size() > 1:
            dist.broadcast(values, dist.get_global_rank(group, 0), group=group)

    def _admit(self, waiting: deque[Growing], room: int) -> list[Growing]:
        admitted: list[Growing] = []
        tokens = 0
        while waiting and len(admitted) < room:
            tokens += len(waiting[0].prompt)
            if admitted and tokens > PREFILL_TOKENS:
                break
            admitted.append(waiting.popleft())
        return admitted

    def _prefill(self, sequences: list[Growing], first_slot: int, cache: KvCache) -> None:
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
        self.stats.prompt_tokens += len(token_ids)
        self._append(sequences, hidden[(lengths.cumsum(0) - 1).to(self._device)])

    def _decode(self, active: list[Growing], cache: KvCache) -> None:
        token_ids = torch.tensor([s.tokens[-1] for s in active], device=self._device)
        position = torch.tensor([s.length - 1 for s in active], device=self._device)
        attend = DecodeStep(cache=cache, position=position)
        hidden = self.model(token_ids[None, :], position, attend).squeeze(1)
        self.stats.decoded_tokens += len(active)
        self._append(active, hidden)

    def _append(self, sequences: list[Growing], hidden: Tensor) -> None:
        """Choose the next token of each sequence from its last hidden state [rows, hidden]."""
        logits = full_logits(
            hidden,
            self.model.output_weight,
            self.model.architecture.vocab_size,
            self.model.tp_group,
        )
        uniforms = [s.uniforms[len(s.tokens)] if len(s.uniforms) else 0.0 for s in sequences]
        tokens, log_probs = choose_tokens(
            logits,
            torch.tensor(uniforms, dtype=torch.float64),
            torch.tensor([len(s.tokens) for s in sequences], device=logits.device),
            self.settings,
        )
        self._as_first_rank(tokens)
        self.stats.sampled_tokens += len(sequences)
        for sequence, token, log_prob in zip(
            sequences, tokens.tolist(), log_probs.tolist(), strict=True
        ):
            sequence.tokens.append(token)
            sequence.log_probs.append(log_prob)

    def _retire(
        self, active: list[Growing], cache: KvCache, finished: dict[int, Growing]
    ) -> list[Growing]:
        """Take finished rows out; the last active rows move into their slots."""
        kept = list(active)
        for slot in reversed(range(len(kept))):
            sequence = kept[slot]
            if not self._is_finished(sequence):
                continue
            finished[sequence.index] = sequence
            last = kept.pop()
            if last is not sequence:
                kept[slot] = last
                cache.move(len(kept), slot, last.length - 1)
        return kept

    def _is_finished(self, sequence: Growing) -> bool:
        full = len(sequence.tokens) == self.settings.max_new_tokens
        return full or sequence.tokens[-1] in self.settings.eos_token_ids


def _memory_of_one_process() -> int:
    """Bytes; processes on CPU share what is there, and we count those of the pool."""
    on_cpu = device.current_device().type == "cpu"
    return device.memory_total() // (dist.get_world_size() if on_cpu else 1)
