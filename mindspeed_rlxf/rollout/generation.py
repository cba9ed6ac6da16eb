"""One call of the native engine's `generate`: schedule the samples and run the model.

Samples wait, grow and end. Rows that end leave the batch, and waiting samples take their place. The
host launches several decode steps before it reads the drawn tokens. It decides which samples enter,
end or go back to waiting from numbers that are equal on all ranks of a replica.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from mindspeed_rlxf.config.memory import GROWTH, PREFILL_TOKENS, round_to_pages
from mindspeed_rlxf.config.rules.tensor_parallel import groups_per_rank
from mindspeed_rlxf.models.decode import Decoder, linear
from mindspeed_rlxf.models.heads import full_logits
from mindspeed_rlxf.models.transformer import TransformerModel
from mindspeed_rlxf.rollout.kv_cache import CacheShape, DecodeStep, KvCache, Prefill
from mindspeed_rlxf.rollout.protocol import GenerationRequest, GenerationStats
from mindspeed_rlxf.rollout.rounds import Rounds
from mindspeed_rlxf.rollout.rows import Alike, Growing, RowStates
from mindspeed_rlxf.rollout.sampling import check_log_probs

REFILLED = 8  # freed slots are refilled when they are 1 in REFILLED of all


@dataclass(frozen=True)
class Limits:
    """Limits of one `generate`.

    rows:   rows that grow at the same time
    tokens: tokens in the cache, rows times the longest row; None = no limit
    steps:  decode steps until the host reads the drawn tokens
    """

    rows: int
    tokens: int | None
    steps: int


def cache_shape(model: TransformerModel) -> CacheShape:
    config = model.config
    return CacheShape(
        num_layers=config.num_layers,
        groups=groups_per_rank(config.num_query_groups, config.tensor_model_parallel_size),
        head_dim=config.kv_channels,
        dtype=config.params_dtype,
    )


class Generation:
    """The samples of one `generate`. Active row i uses slot i of the cache and of the states."""

    def __init__(
        self,
        model: TransformerModel,
        requests: Sequence[GenerationRequest],
        limits: Limits,
        stats: GenerationStats,
        rounds: Rounds,
    ) -> None:
        self.model, self.limits, self.stats, self.rounds = model, limits, stats, rounds
        self.waiting = deque(map(Growing.begin, requests))
        self.active: list[Growing] = []
        self.where = next(model.parameters()).device
        width = max(request.settings.max_new_tokens for request in requests)
        self._most = max(len(request.prompt) for request in requests) + width  # tokens of a row
        self._decoder = Decoder(model, self._most)
        self.cache = KvCache(cache_shape(model), self._most, self.where)
        self.states = RowStates(limits.rows, width, self.where)
        self._groups: list[Alike] | None = None  # of the active rows
        self._counts = np.zeros(0, np.int64)  # response tokens of the active rows, when last read
        self._prompts = np.zeros(0, np.int64)  # tokens of their prompts
        self._prompt_states: dict[bytes, Tensor] = {}  # last state of each prompt, [hidden]

    def advance(self) -> list[Growing]:
        """Compute until at least one sample ends; return the samples that ended."""
        finished: list[Growing] = []
        while not finished:
            refills = self._refills()
            if refills:
                self._admit()
            else:
                self._decode()
            finished = self._look(decoded=not refills)
        return finished

    # Rows that enter

    def _refills(self) -> bool:
        """Whether enough waiting samples can enter to make a prefill worthwhile."""
        entering = self._entering()
        if not self.active:
            return True
        rows = len(self.active) + entering
        return entering > 0 and entering >= min(len(self.waiting), rows // REFILLED)

    def _entering(self) -> int:
        """Count the waiting samples with a free slot and room for GROWTH tokens in the cache."""
        longest, rows, limit = self._room(0), len(self.active), self.limits.tokens
        for row in itertools.islice(self.waiting, self.limits.rows - rows):
            longest, rows = max(longest, row.length), rows + 1
            if limit is not None and rows * self._capacity(longest + GROWTH) > limit:
                return rows - 1 - len(self.active)
        return rows - len(self.active)

    def _admit(self) -> None:
        """Prefill as many waiting samples as can enter, at least one."""
        first, rows = len(self.active), max(self._entering(), 1)
        entering = [self.waiting.popleft() for _ in range(rows)]
        kept, counts = self.active, [len(row.tokens) for row in entering]
        self._place([*kept, *entering], np.concatenate((self._counts, counts)).astype(np.int64))
        self.cache.fit(len(self.active), self._room(self.limits.steps))
        self.states.begin(first, entering)
        donors = {row.key: slot for slot, row in enumerate(kept) if row.key in self._prompt_states}
        for pack in self._packs(first, donors):
            self._prefill(pack)
        still = {row.key for row in self.waiting}
        self._prompt_states = {
            key: state for key, state in self._prompt_states.items() if key in still
        }

    def _packs(self, first: int, donors: dict[bytes, int]) -> Iterator[dict[int, int]]:
        """Cut the rows from slot `first` on into packs of PREFILL_TOKENS tokens to compute.

        A row that is longer makes a pack of its own.

        donors: prompt -> a slot that has it in the cache; new prompts are added
        Yields packs: slot -> slot whose prompt it copies, or itself if it is computed.
        """
        pack: dict[int, int] = {}
        tokens = 0
        for slot, row in enumerate(self.active[first:], start=first):
            if not row.tokens and row.key in donors:
                pack[slot] = donors[row.key]
                continue
            if tokens and tokens + len(row.known) > PREFILL_TOKENS:
                yield pack
                pack, tokens = {}, 0
            tokens += len(row.known)
            pack[slot] = slot
            if not row.tokens:
                donors[row.key] = slot
        yield pack

    def _prefill(self, pack: dict[int, int]) -> None:
        """Fill the cache of the slots of a pack, and draw the next token of each row.

        Rows that are their own source are computed in one pass. The others copy the prompt of
        their source.

        pack: slot -> slot that holds its prompt, or itself
        """
        computed = [slot for slot, source in pack.items() if slot == source]
        found = dict(zip(computed, self._compute(computed), strict=True)) if computed else {}
        for slot, state in found.items():
            if not self.active[slot].tokens:
                self._prompt_states[self.active[slot].key] = state
        copied = [(source, slot) for slot, source in pack.items() if slot != source]
        if copied:
            source, target = self._tensor(copied).unbind(1)
            longest = max(len(self.active[slot].request.prompt) for _, slot in copied)
            self.cache.copy(source, target, longest)
        rows = [self.active[slot] for slot in pack]
        states = [found.get(slot, self._prompt_states.get(self.active[slot].key)) for slot in pack]
        slots = slice(min(pack), max(pack) + 1)
        self._append(torch.stack(states), slots, self.states.group(rows))  # type: ignore[arg-type]

    def _compute(self, slots: list[int]) -> Tensor:
        """Run the known tokens of rows through the model, which fills the cache.

        Returns the hidden states of their last tokens, [slots, hidden].
        """
        known = [self.active[slot].known for slot in slots]
        lengths = np.array([len(tokens) for tokens in known])
        token_ids = torch.from_numpy(np.concatenate(known)).to(self.where)
        position = self._tensor(np.concatenate([np.arange(n) for n in lengths]))
        slot = self._tensor(np.repeat(slots, lengths))
        attend = Prefill(
            lengths=tuple(lengths.tolist()), cache=self.cache, slot=slot, position=position
        )
        self.rounds.announce(len(token_ids))
        hidden = self.model(token_ids[None, :], position, attend).squeeze(1)
        self.stats.prompt_tokens += len(token_ids)
        return hidden[self._tensor(lengths.cumsum() - 1)]

    # Rows that grow

    def _decode(self) -> None:
        """Launch the decode steps up to the next read by the host."""
        left = [row.settings.max_new_tokens for row in self.active] - self._counts
        steps = min(self.limits.steps, int(left.max()))
        self._set_back(steps)
        rows = len(self.active)
        self.cache.fit(rows, self._room(steps))
        if self._groups is None:
            self._groups = self.states.group(self.active)
        for _ in range(steps):
            position = self.states.position[:rows]
            attend = DecodeStep(cache=self.cache, position=position)
            self.rounds.announce(rows)
            hidden = self._decoder(self.states.last[:rows], position, attend)
            self._append(hidden, slice(0, rows), self._groups)

    def _append(self, hidden: Tensor, slots: slice, groups: Sequence[Alike]) -> None:
        """Draw and append the next token of each row. hidden: last states, [rows, hidden]"""
        model = self.model
        weight, vocab, group = model.output_weight, model.architecture.vocab_size, model.tp_group
        logits = full_logits(hidden, weight, vocab, group, linear)
        tokens, log_probs = self.states.choose(logits, slots, groups)
        as_first_rank(tokens, group)
        self.states.append(tokens, log_probs, slots, groups)

    # Rows that leave

    def _look(self, decoded: bool) -> list[Growing]:
        """Wait for the drawn tokens; remove the samples that have ended and return them.

        decoded: the tokens are of decode steps, not of a prefill
        """
        counts, going = self.states.progress(len(self.active))
        counts, ended = counts.copy(), ~going
        stopped = [slot for slot, row in enumerate(self.active) if row.settings.stop is not None]
        if stopped:
            drawn, _ = self.states.read(stopped, int(counts.max()))
            for slot, tokens in zip(stopped, drawn.tolist(), strict=True):
                row = self.active[slot]
                ended[slot] |= row.take(tokens[len(row.tokens) : counts[slot]])
                counts[slot] = len(row.tokens)
        new = int((counts - self._counts).sum())
        self.stats.sampled_tokens += new
        self.stats.decoded_tokens += new if decoded else 0
        self._counts = counts
        leaving = np.flatnonzero(ended).tolist()
        return self._take_out(leaving) if leaving else []

    def _set_back(self, steps: int) -> None:
        """If the cache cannot hold the next steps, put samples back among the waiting ones.

        Those with the fewest tokens, until the others have room for GROWTH more tokens.
        """
        limit, rows = self.limits.tokens, len(self.active)
        if limit is None or rows * self._capacity(self._room(steps)) <= limit:
            return
        kept = np.argsort(-self._counts, kind="stable").tolist()
        lengths = self._prompts + self._counts
        while len(kept) > 1:
            if len(kept) * self._capacity(int(lengths[kept].max()) + GROWTH) <= limit:
                break
            kept.pop()
        back = self._take_out(sorted(set(range(rows)) - set(kept)))
        self.waiting.extendleft(reversed(back))

    def _take_out(self, slots: list[int]) -> list[Growing]:
        """Copy rows' tokens and log-probs to the host, and let the last rows take their slots."""
        tokens, log_probs = self.states.read(slots, int(self._counts[slots].max()))
        for slot, drawn, logs in zip(slots, tokens.tolist(), log_probs, strict=True):
            row, count = self.active[slot], self._counts[slot]
            check_log_probs(logs[:count])
            row.tokens, row.log_probs = drawn[:count], logs[:count].tolist()
        taken, gone = [self.active[slot] for slot in slots], set(slots)
        size = len(self.active) - len(slots)
        target = [slot for slot in slots if slot < size]
        source = [slot for slot in range(size, len(self.active)) if slot not in gone]
        order = np.arange(size)
        if source:
            order[target] = source
            where = self._tensor(source), self._tensor(target)
            self.states.move(*where)
            self.cache.copy(*where, self.cache.capacity)
        self._place([self.active[slot] for slot in order], self._counts[order])
        return taken

    def _place(self, rows: list[Growing], counts: np.ndarray) -> None:
        """Set the active rows. counts: [rows] int64, tokens of their responses"""
        self.active, self._counts, self._groups = rows, counts, None
        self._prompts = np.array([len(row.request.prompt) for row in rows], dtype=np.int64)

    def _capacity(self, length: int) -> int:
        """Return the tokens that each row of the cache has room for, given the longest row's."""
        return min(round_to_pages(length), self._most)

    def _room(self, more: int) -> int:
        """Return the tokens of the longest row after `more` tokens."""
        lengths = self._prompts + self._counts
        return min(int(lengths.max(initial=0)) + more, self._most)

    def _tensor(self, numbers: Sequence[object] | np.ndarray) -> Tensor:
        return torch.as_tensor(np.asarray(numbers, dtype=np.int64)).to(self.where)


def as_first_rank(values: Tensor, group: dist.ProcessGroup) -> None:
    """Replace the values by the first rank's; ranks with different values would wait for ever."""
    if group.size() > 1:
        dist.broadcast(values, dist.get_global_rank(group, 0), group=group)
