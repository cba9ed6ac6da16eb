"""Generation in the native engine: schedule the samples and run the model.

A sample waits in a queue, then is a batch row until its response ends. Rows that end leave the
batch, and waiting samples take their places in it (continuous batching). A generation may stop
after any decode step and go on later, with more samples. The host launches several decode steps
before it reads the drawn tokens. It decides which samples enter, end or go back to the queue from
numbers that are equal on all replica ranks.
"""

import itertools
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from mindspeed_rlxf.config.architecture import groups_per_rank
from mindspeed_rlxf.config.generation_memory import GROWTH, PREFILL_TOKENS, round_to_pages
from mindspeed_rlxf.models.attention import Attend
from mindspeed_rlxf.models.decode import Decoder, linear
from mindspeed_rlxf.models.heads import first_rank_logits, full_logits
from mindspeed_rlxf.models.transformer import TransformerModel
from mindspeed_rlxf.rollout.decode_graphs import DecodeGraphs, padded_rows
from mindspeed_rlxf.rollout.expert_sync import ExpertSync
from mindspeed_rlxf.rollout.kv_cache import (
    CacheShape,
    Continuation,
    DecodeStep,
    KeptRow,
    KvCache,
    Prefill,
)
from mindspeed_rlxf.rollout.prefixes import CachedPrefix, PrefixTree, order_by_source
from mindspeed_rlxf.rollout.rollout_engine import GenerationRequest, GenerationStats
from mindspeed_rlxf.rollout.rows import GrowingSample, RowGroup, RowStates
from mindspeed_rlxf.rollout.sampling import check_log_probs, draw_tokens

REFILLED = 8  # while others decode, samples enter once they would be 1 in REFILLED of the rows


def cache_shape(model: TransformerModel) -> CacheShape:
    """Return a model's KV cache shape on this rank."""
    config = model.config
    return CacheShape(
        num_layers=config.num_layers,
        groups=groups_per_rank(config.num_query_groups, config.tensor_model_parallel_size),
        head_dim=config.kv_channels,
        dtype=config.params_dtype,
    )


@dataclass(frozen=True)
class Limits:
    """Sizes of a generation.

    Attention on CPU differs in bits between cache capacities, so what is sampled depends on them.

    Attributes:
        prompt: Most tokens of a prompt.
        response: Most tokens of a response.
        rows: Most rows in the batch.
        tokens: Most tokens in the KV cache, counted as rows times the longest row; None = no limit.
    """

    prompt: int
    response: int
    rows: int
    tokens: int | None


class Generation:
    """The unfinished samples and their batch; batch row i has row i of the KV cache.

    Attributes:
        weights_version: Of the weights, which must not change.
        stats: Each pass adds to its counts; those of the last `advance`.
        waiting: Samples outside the batch; the first one enters next.
        active: Samples in the batch, by row.
    """

    def __init__(
        self,
        model: TransformerModel,
        weights_version: int,
        expert_sync: ExpertSync,
        limits: Limits,
        steps: int,
        kept_rows: dict[int, KeptRow],
        first_rank_draws: bool = False,
        decode_graphs: bool = False,
    ) -> None:
        """Allocate an empty KV cache.

        Args:
            model: Module with all layers, in evaluation mode.
            weights_version: Of the model's weights.
            expert_sync: Announces each pass to the ranks that share experts.
            limits: Sizes; no request may be longer.
            steps: Decode steps launched before the host reads the drawn tokens.
            kept_rows: Sample id -> its row, of samples whose turn has ended; changed here.
            first_rank_draws: Whether the logits go to the first tensor-parallel rank alone.
            decode_graphs: Whether decode steps run as graphs (`decode_graphs.py`); without tensor
                parallelism and experts.
        """
        self.model, self.weights_version, self.expert_sync = model, weights_version, expert_sync
        self.max_rows, self.max_tokens, self.steps = limits.rows, limits.tokens, steps
        self.kept_rows = kept_rows
        self._first_rank_draws = first_rank_draws and model.tp_group.size() > 1
        self._graphs = DecodeGraphs() if decode_graphs else None
        self.stats = GenerationStats()
        self.waiting: deque[GrowingSample] = deque()
        self.active: list[GrowingSample] = []
        self.device = next(model.parameters()).device
        self._num_added = 0
        # the most tokens that a row can have
        self._max_length = limits.prompt + limits.response
        self._decoder = Decoder(model, self._max_length)
        self._linear = linear if model.linear is F.linear else model.linear  # computes logits
        self.cache = KvCache(cache_shape(model), self._max_length, self.device)
        self.states = RowStates(limits.rows, limits.response, self.device)
        self._groups: list[RowGroup] | None = None  # the rows by settings; None = to be made
        self._counts = np.zeros(0, np.int64)  # response tokens of each row, when last read
        self._prompts = np.zeros(0, np.int64)  # prompt tokens of each row
        # prompt -> hidden state of its last token [hidden], while samples wait that have it
        self._prompt_states: dict[bytes, Tensor] = {}

    @property
    def is_empty(self) -> bool:
        """Whether no sample is unfinished."""
        return not self.waiting and not self.active

    def add(self, requests: Sequence[GenerationRequest]) -> None:
        """Append samples to the queue, each with the part of its response that has begun."""
        for request in requests:
            self.waiting.append(GrowingSample(request, self._num_added))
            self._num_added += 1

    def advance(self, steps: int | None, stats: GenerationStats) -> tuple[list[GrowingSample], int]:
        """Prefill and decode until a sample ends, or for `steps` decode steps (None = no limit).

        It prefills if the batch is empty, or enough waiting samples fit: all, or 1 in REFILLED rows
        in the resulting batch. Otherwise it decodes. Call it only while samples wait or run. Adds
        to the counts `stats`.

        Returns:
            The samples that ended and left the batch, in the order of its rows, and the number of
            decode steps.
        """
        self.stats = stats
        finished: list[GrowingSample] = []
        num_steps = 0
        while not finished and num_steps != steps:
            entering, rows = self._count_admissible(), len(self.active)
            enough = min(len(self.waiting), (rows + entering) // REFILLED)
            refills = not rows or (entering > 0 and entering >= enough)
            if refills:
                for pack in self._admit():
                    self._prefill(pack)
                self._drop_unused_states()
            else:
                num_steps += self._decode(None if steps is None else steps - num_steps)
            finished = self._remove_ended(decoded=not refills)
        return finished, num_steps

    def withdraw(self) -> list[GenerationRequest]:
        """Remove all samples; return the requests for their rest, in the order of `add`."""
        if self.active:
            self.waiting += self._remove_rows(list(range(len(self.active))))
        samples = sorted(self.waiting, key=lambda sample: sample.number)
        self.waiting.clear()
        return [sample.make_request(self.weights_version) for sample in samples]

    # Rows that enter

    def _count_admissible(self) -> int:
        longest, rows, limit = self._longest_row(0), len(self.active), self.max_tokens
        for row in itertools.islice(self.waiting, self.max_rows - rows):
            longest, rows = max(longest, len(row.request.prompt) + len(row.tokens)), rows + 1
            if limit is not None and rows * self._row_capacity(longest + GROWTH) > limit:
                return rows - 1 - len(self.active)
        return rows - len(self.active)

    def _admit(self) -> Iterator[dict[int, CachedPrefix]]:
        """Move the first waiting samples into the batch, all that fit, at least one.

        Returns:
            The packs to prefill (`_make_packs`). The prefill also draws each sample's next token.
        """
        first, rows = len(self.active), max(self._count_admissible(), 1)
        entering = [self.waiting.popleft() for _ in range(rows)]
        kept, counts = self.active, [len(row.tokens) for row in entering]
        self._set_active(
            [*kept, *entering], np.concatenate((self._counts, counts)).astype(np.int64)
        )
        kept_rows = self._take_kept(first)
        num_taken = sum(len(row.token_ids) for row in kept_rows.values())
        self._fit_cache(self._longest_row(self.steps), num_taken)
        self.states.set_up(first, entering)
        for cache_row, kept_row in kept_rows.items():
            self.cache.write_row(cache_row, kept_row.keys_and_values)
        return self._make_packs(first, {at: len(row.token_ids) for at, row in kept_rows.items()})

    def _take_kept(self, first: int) -> dict[int, KeptRow]:
        """Return what was kept of the batch rows from `first`, by cache row."""
        kept_rows: dict[int, KeptRow] = {}
        for cache_row, row in enumerate(self.active[first:], start=first):
            kept_row = self.kept_rows.pop(row.request.sample_id, None)
            if kept_row is not None:
                begin = row.prefill_ids[:-1][: len(kept_row.token_ids)]
                if np.array_equal(kept_row.token_ids, begin):
                    kept_rows[cache_row] = kept_row
        return kept_rows

    def _fit_cache(self, longest: int, num_taken: int = 0) -> None:
        """Resize the cache for the batch; forget kept rows, oldest first, for which no room is.

        num_taken: tokens that were kept, and are copied into the cache next.
        """
        capacity = self._row_capacity(longest)
        rows = self._cache_rows(len(self.active), capacity)
        num_cached = self.cache.num_rows * self.cache.capacity  # it may stay as large as it is
        num_cached = max(num_cached, rows * capacity)
        self._forget_kept(self._most_tokens - num_cached - num_taken)
        self.cache.fit(rows, longest)

    @property
    def _most_tokens(self) -> int:
        """Tokens in the cache and in kept rows for which memory is planned."""
        if self.max_tokens is not None:
            return self.max_tokens
        return self.max_rows * self._row_capacity(self._max_length)

    def _forget_kept(self, room: int) -> None:
        """Forget kept rows, oldest first, until they have at most `room` tokens."""
        num_kept_tokens = sum(len(kept.token_ids) for kept in self.kept_rows.values())
        for sample_id in list(self.kept_rows):
            if num_kept_tokens <= room:
                break
            num_kept_tokens -= len(self.kept_rows.pop(sample_id).token_ids)

    def _drop_unused_states(self) -> None:
        """Drop the states for prompts that no waiting sample has."""
        still = {row.key for row in self.waiting}
        self._prompt_states = {
            key: state for key, state in self._prompt_states.items() if key in still
        }

    def _make_packs(
        self, first: int, restored: dict[int, int]
    ) -> Iterator[dict[int, CachedPrefix]]:
        """Group the batch rows from `first` into packs with at most PREFILL_TOKENS computed tokens.

        A longer row is computed alone.

        Args:
            first: Index of the first batch row to group.
            restored: Cache row -> its first tokens that are in it already.

        Yields:
            Cache row -> what it copies instead of computing it. At least one pack.
        """
        prompt_rows: dict[bytes, int] = {}  # prompt -> a cache row that has it
        state_rows: dict[bytes, int] = {}  # the same, where its last hidden state is known
        prefixes = PrefixTree()
        for cache_row, row in enumerate(self.active[:first]):
            prompt_rows[row.key] = cache_row
            prefixes.add(row.request.prompt, cache_row)
            if row.key in self._prompt_states:
                state_rows[row.key] = cache_row
        pack: dict[int, CachedPrefix] = {}
        tokens = 0
        for cache_row, row in enumerate(self.active[first:], start=first):
            source = (prompt_rows if row.tokens else state_rows).get(row.key)
            if cache_row in restored:
                cached = CachedPrefix(cache_row, restored[cache_row])
            elif source is not None:
                cached = CachedPrefix(source, len(row.request.prompt))
            else:
                cached = prefixes.find(row.request.prompt[:-1])
                if 2 * cached.length < len(row.prefill_ids):
                    cached = CachedPrefix(cache_row, 0)
            num_computed = len(row.prefill_ids) - cached.length
            if tokens and num_computed and tokens + num_computed > PREFILL_TOKENS:
                yield pack
                pack, tokens = {}, 0
            tokens += num_computed
            pack[cache_row] = cached
            if row.key not in prompt_rows:
                prompt_rows[row.key] = cache_row
                prefixes.add(row.request.prompt, cache_row)
            if not row.tokens:
                state_rows.setdefault(row.key, cache_row)
        yield pack

    def _prefill(self, pack: dict[int, CachedPrefix]) -> None:
        """Fill a pack's cache rows, and draw and append each row's next token.

        Keeps the last hidden state for each computed prompt in `_prompt_states` (not for a row that
        already has tokens), so that rows in later packs can draw their first token too.

        Args:
            pack: Consecutive cache rows -> what each copies.
        """
        last: dict[int, Tensor] = {}  # cache row -> hidden state of its last token
        for cache_rows in order_by_source(pack):
            copied = [
                (pack[cache_row].source, cache_row)
                for cache_row in cache_rows
                if pack[cache_row].length > 0 and pack[cache_row].source != cache_row
            ]
            if copied:
                source, target = self._tensor(copied).unbind(1)
                self.cache.copy(
                    source, target, max(pack[cache_row].length for _, cache_row in copied)
                )
            whole = [cache_row for cache_row in cache_rows if pack[cache_row].length == 0]
            if whole:
                last.update(zip(whole, self._forward_prefill(whole), strict=True))
            rest = {
                cache_row: pack[cache_row].length
                for cache_row in cache_rows
                if 0 < pack[cache_row].length < len(self.active[cache_row].prefill_ids)
            }
            if rest:
                last.update(zip(rest, self._forward_continuation(rest), strict=True))
            for cache_row in (*whole, *rest):
                if not self.active[cache_row].tokens:
                    self._prompt_states[self.active[cache_row].key] = last[cache_row]
        rows = [self.active[cache_row] for cache_row in pack]
        states = [
            last.get(cache_row, self._prompt_states.get(self.active[cache_row].key))
            for cache_row in pack
        ]
        slice_of_pack = slice(min(pack), max(pack) + 1)
        groups = self.states.group_by_settings(rows)
        self._draw_next(torch.stack(states), slice_of_pack, groups)  # type: ignore[arg-type]

    def _forward_prefill(self, cache_rows: list[int]) -> Tensor:
        """Run prompts, and their responses so far, through the model in one pass.

        Returns the last tokens' hidden states, [rows, hidden].
        """
        rows = [self.active[cache_row].prefill_ids for cache_row in cache_rows]
        lengths = np.array([len(tokens) for tokens in rows])
        position = self._tensor(np.concatenate([np.arange(n) for n in lengths]))
        cache_row = self._tensor(np.repeat(cache_rows, lengths))
        attend = Prefill(
            lengths=tuple(lengths.tolist()),
            cache=self.cache,
            cache_row=cache_row,
            position=position,
        )
        return self._forward(rows, position, attend)

    def _forward_continuation(self, num_cached: dict[int, int]) -> Tensor:
        """Run what follows the cached tokens of rows through the model in one pass.

        Args:
            num_cached: Cache row -> its tokens in the cache.

        Returns:
            The last tokens' hidden states, [rows, hidden].
        """
        rows = [
            self.active[cache_row].prefill_ids[length:] for cache_row, length in num_cached.items()
        ]
        attend = Continuation(
            cache=self.cache,
            cache_rows=tuple(num_cached),
            num_earlier=tuple(num_cached.values()),
            lengths=tuple(len(tokens) for tokens in rows),
        )
        return self._forward(rows, attend.position, attend)

    def _forward(self, rows: list[np.ndarray], position: Tensor, attend: Attend) -> Tensor:
        """Compute packed rows, and fill the cache: announce the pass, and count the tokens.

        Returns the last tokens' hidden states, [rows, hidden].
        """
        lengths = np.array([len(tokens) for tokens in rows])
        token_ids = torch.from_numpy(np.concatenate(rows)).to(self.device)
        self.expert_sync.announce(len(token_ids))
        hidden = self.model(token_ids[None, :], position, attend).squeeze(1)
        self.stats.prompt_tokens += len(token_ids)
        return hidden[self._tensor(lengths.cumsum() - 1)]

    # Rows that decode

    def _decode(self, most: int | None) -> int:
        """Launch up to `steps` decode steps for all rows, without reading the drawn tokens.

        Fewer if no row may have as many more tokens, and at most `most`. First moves rows back to
        the queue if the cache cannot hold these steps, and resizes it. Announces each step to the
        ranks that share experts. Returns the number of steps.
        """
        left = [row.settings.max_new_tokens for row in self.active] - self._counts
        steps = min(self.steps, int(left.max()))
        if most is not None:
            steps = min(steps, most)
        self._preempt(steps)
        rows = len(self.active)
        self._fit_cache(self._longest_row(steps))
        if self._groups is None:
            self._groups = self.states.group_by_settings(self.active)
        run_step = partial(self._decode_once, rows, self._groups)
        if self._graphs is not None and len(self._groups) == 1:
            num_padded = padded_rows(rows, self.cache.num_rows)
            self.states.set_padding(slice(rows, num_padded))
            step = partial(self._decode_once, num_padded, self._groups)
            settings = self._groups[0].settings
            run_step = partial(self._graphs.run, step, num_padded, settings, self.cache)
        for _ in range(steps):
            self.expert_sync.announce(rows)
            run_step()
        return steps

    def _decode_once(self, rows: int, groups: Sequence[RowGroup]) -> None:
        """Compute the first `rows` rows' next tokens, without waiting for the device.

        All that differs between steps is read from `states`, as this may be captured in a graph.
        """
        position = self.states.position[:rows]
        attend = DecodeStep(cache=self.cache, position=position)
        hidden = self._decoder(self.states.last[:rows], position, attend)
        self._draw_next(hidden, slice(0, rows), groups)

    def _draw_next(self, hidden: Tensor, cache_rows: slice, groups: Sequence[RowGroup]) -> None:
        model = self.model
        weight, vocab, group = model.output_weight, model.architecture.vocab_size, model.tp_group
        gather = first_rank_logits if self._first_rank_draws else full_logits
        logits = gather(hidden, weight, vocab, group, self._linear)
        uniforms, count = self.states.next_uniforms(cache_rows)
        tokens, log_probs = torch.zeros_like(count), torch.zeros_like(uniforms)
        if logits is not None:
            for row_group in groups:
                at = row_group.rows
                tokens[at], log_probs[at] = draw_tokens(
                    logits[at], uniforms[at], count[at], row_group.settings, row_group.ends
                )
        if self._first_rank_draws:
            both = torch.stack((tokens, log_probs.view(torch.int32).long()))
            broadcast_from_first(both, group)
            tokens, log_probs = both[0], both[1].int().view(torch.float32)
        else:
            broadcast_from_first(tokens, group)
        self.states.append(tokens, log_probs, cache_rows, groups)

    # Rows that leave

    def _remove_ended(self, decoded: bool) -> list[GrowingSample]:
        """Wait for the drawn tokens; remove ended samples from the batch and return them.

        In the order of the batch; [] if no sample has ended. Drops tokens after a stop string and
        counts the new tokens.

        Args:
            decoded: Whether the new tokens come from decode steps, not from a prefill.
        """
        counts, going = self.states.read_progress(len(self.active))
        counts, ended = counts.copy(), ~going
        stopped = [index for index, row in enumerate(self.active) if row.settings.stop is not None]
        if stopped:
            copied = np.array([len(self.active[index].tokens) for index in stopped])
            drawn = self.states.read_new(stopped, copied, counts[stopped])
            for index, tokens in zip(stopped, drawn, strict=True):
                row = self.active[index]
                ended[index] |= row.append_until_end(tokens)
                counts[index] = len(row.tokens)
        new = int((counts - self._counts).sum())
        self.stats.sampled_tokens += new
        self.stats.decoded_tokens += new if decoded else 0
        self._counts = counts
        leaving = np.flatnonzero(ended).tolist()
        if not leaving:
            return []
        for index in leaving:
            if self.active[index].request.is_turn:
                self._keep(index)
        return self._remove_rows(leaving)

    def _keep(self, index: int) -> None:
        """Keep a row for the next turn, without its last token, which no pass has computed yet.

        Does nothing without room beside the cache.
        """
        row = self.active[index]
        num_cached = self.cache.num_rows * self.cache.capacity
        room = self._most_tokens - num_cached - len(row.request.prompt) - len(row.tokens)
        if room < 0:
            return
        self._forget_kept(room)
        drawn, _ = self.states.read([index], int(self._counts[index]))
        token_ids = np.concatenate((row.request.prompt, drawn[0].numpy()))[:-1]
        keys_and_values = self.cache.read_row(index, len(token_ids))
        self.kept_rows[row.request.sample_id] = KeptRow(token_ids, keys_and_values)

    def _preempt(self, steps: int) -> None:
        """Move rows back to the queue's head if the cache is too small for `steps` more steps."""
        limit, rows = self.max_tokens, len(self.active)
        if limit is None or rows == 1:
            return
        if rows * self._row_capacity(self._longest_row(steps)) <= limit:
            return
        kept = np.argsort(-self._counts, kind="stable").tolist()
        lengths = self._prompts + self._counts
        while len(kept) > 1:
            if len(kept) * self._row_capacity(int(lengths[kept].max()) + GROWTH) <= limit:
                break
            kept.pop()
        preempted = self._remove_rows(sorted(set(range(rows)) - set(kept)))
        self.waiting.extendleft(reversed(preempted))

    def _remove_rows(self, indices: list[int]) -> list[GrowingSample]:
        """Remove rows from the batch; return their samples, in the order of `indices`.

        Waits for the device, and copies tokens and log-probs to the samples. The last rows move
        into the freed ones.

        Raises:
            FloatingPointError: A log-prob is nan.
        """
        tokens, log_probs = self.states.read(indices, int(self._counts[indices].max()))
        for index, drawn, logs in zip(indices, tokens.tolist(), log_probs, strict=True):
            row, count = self.active[index], self._counts[index]
            check_log_probs(logs[:count])
            row.tokens, row.log_probs = drawn[:count], logs[:count].tolist()
        removed, freed = [self.active[index] for index in indices], set(indices)
        size = len(self.active) - len(indices)
        target = [index for index in indices if index < size]
        source = [index for index in range(size, len(self.active)) if index not in freed]
        order = np.arange(size)
        if source:
            order[target] = source
            source_and_target = self._tensor(source), self._tensor(target)
            self.states.copy_rows(*source_and_target)
            self.cache.copy(*source_and_target, self.cache.capacity)
        self._set_active([self.active[index] for index in order], self._counts[order])
        return removed

    def _set_active(self, rows: list[GrowingSample], counts: np.ndarray) -> None:
        self.active, self._counts, self._groups = rows, counts, None
        self._prompts = np.array([len(row.request.prompt) for row in rows], dtype=np.int64)

    def _cache_rows(self, rows: int, capacity: int) -> int:
        """Return how many rows the cache has for `rows` samples; with graphs also padding."""
        if self._graphs is None:
            return rows
        most = max(rows, self._most_tokens // capacity)
        return padded_rows(rows, min(most, self.max_rows))

    def _row_capacity(self, length: int) -> int:
        return min(round_to_pages(length), self._max_length)

    def _longest_row(self, more: int) -> int:
        lengths = self._prompts + self._counts
        return min(int(lengths.max(initial=0)) + more, self._max_length)

    def _tensor(self, numbers: Sequence[object] | np.ndarray) -> Tensor:
        return torch.as_tensor(np.asarray(numbers, dtype=np.int64)).to(self.device)


def broadcast_from_first(values: Tensor, group: dist.ProcessGroup) -> None:
    """Replace `values` in place by those on the group's first rank; a collective.

    Ranks acting on different values would wait for each other for ever.
    """
    if group.size() > 1:
        dist.broadcast(values, dist.get_global_rank(group, 0), group=group)
