"""Hand out each iteration's training prompts."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from mindspeed_rlxf.config.problems import Problem, UserError
from mindspeed_rlxf.config.schema import RunConfig
from mindspeed_rlxf.data.batch import Prompts
from mindspeed_rlxf.data.fixed_responses import KEY, FixedResponses
from mindspeed_rlxf.data.prompt_store import Prompt, PromptStore
from mindspeed_rlxf.data.sampler import (
    ConsumedPrompts,
    MixtureSampler,
    PromptSampler,
    make_sampler,
)


@dataclass(frozen=True)
class SampledBatch:
    """A batch of the sampler, read.

    Attributes:
        sampler: State of the sampler before the batch.
        indices: Of its prompts in the data set.
        prompts: The prompts.
    """

    sampler: dict[str, Any]
    indices: list[int]
    prompts: list[Prompt]


class PromptSource:
    """Draws training prompts in sampled order, and numbers every sample in the run.

    A group is a prompt with its `n_samples_per_prompt` samples. Groups are drawn in the sampler's
    order, any number at a time, and consumed in the same order: once training has passed them.
    `state_dict` is the position of the first group that is not consumed, so that a resumed run
    draws those again that were drawn and not trained.

    Example: with batches of 4, `next_groups(6)` and `consume(3)` the state is the sampler's before
    the first batch, an offset of 3 and the sample id of the fourth group.
    """

    def __init__(
        self,
        prompts: Sequence[Prompt],
        sampler: PromptSampler | MixtureSampler,
        n_samples_per_prompt: int,
        fixed: FixedResponses | None = None,
    ) -> None:
        """Start with sample id 0 and no group drawn.

        Advances `sampler`, which draws indices into `prompts`. `fixed` responses replace
        generation.
        """
        self.prompts, self.sampler, self.fixed = prompts, sampler, fixed
        self.n_samples_per_prompt = n_samples_per_prompt
        self._batches: deque[SampledBatch] = deque()  # from the first group not consumed on
        self._offset = 0  # consumed groups of the first of them
        self._num_drawn = 0  # groups drawn and not consumed
        self._first_sample_id = 0  # of the first group not consumed

    @classmethod
    def from_config(
        cls, config: RunConfig, prompts: Sequence[Prompt], fixed: FixedResponses | None = None
    ) -> PromptSource:
        """Return a run's source, at its first batch; several data sets are drawn by weight."""
        training, data = config.training, config.data
        sizes = prompts.sizes if isinstance(prompts, PromptStore) else (len(prompts),)
        batch = training.global_batch_size
        sampler = make_sampler(sizes, data.train_weights, batch, training.seed, data.shuffle)
        return cls(prompts, sampler, config.actor_rollout.n_samples_per_prompt, fixed)

    def next_groups(self, count: int) -> Prompts:
        """Return the next `count` groups: `n_samples_per_prompt` consecutive rows for each prompt.

        Reads as many batches of the sampler as are needed. Numbers the samples.
        """
        first = self._offset + self._num_drawn
        self._read(first + count)
        everything = [prompt for batch in self._batches for prompt in batch.prompts]
        chosen = everything[first : first + count]
        rows = [prompt for prompt in chosen for _ in range(self.n_samples_per_prompt)]
        first_sample_id = self._first_sample_id + self._num_drawn * self.n_samples_per_prompt
        self._num_drawn += count
        return as_rows(rows, first_sample_id, self.fixed)

    def read_ahead(self, count: int) -> None:
        """Read the prompts of the next `count` groups; `state_dict` does not change."""
        self._read(self._offset + self._num_drawn + count)

    def consume(self, count: int) -> ConsumedPrompts:
        """Move the first group that is not consumed by `count`; return the prompts passed.

        As indices, with their first sample id and the samples per prompt.
        """
        assert count <= self._num_drawn, f"{self._num_drawn} groups are drawn, not {count}"
        everything = [index for batch in self._batches for index in batch.indices]
        indices = everything[self._offset : self._offset + count]
        consumed = ConsumedPrompts(self._first_sample_id, self.n_samples_per_prompt, indices)
        self._first_sample_id += count * self.n_samples_per_prompt
        self._num_drawn -= count
        self._offset += count
        while self._batches and self._offset >= len(self._batches[0].indices):
            self._offset -= len(self._batches.popleft().indices)
        return consumed

    def _read(self, num_groups: int) -> None:
        """Read batches until they have `num_groups` groups."""
        num_read = sum(len(batch.indices) for batch in self._batches)
        while num_read < num_groups:
            before, indices = self.sampler.state_dict(), self.sampler.next_batch()
            prompts = [self.prompts[index] for index in indices]
            self._batches.append(SampledBatch(before, indices, prompts))
            num_read += len(indices)

    def state_dict(self) -> dict[str, Any]:
        """Return the position of the first group that is not consumed.

        "sampler": the sampler's state before the batch that has the group, "offset": groups of that
        batch before it, "next_sample_id": its first sample.
        """
        sampler = self._batches[0].sampler if self._batches else self.sampler.state_dict()
        return {
            "sampler": sampler,
            "offset": self._offset,
            "next_sample_id": self._first_sample_id,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the result of `state_dict`; nothing is drawn beyond it."""
        self.sampler.load_state_dict(state["sampler"])
        self._batches.clear()
        self._num_drawn = 0
        self._offset = state.get("offset", 0)  # older checkpoints are all between two batches
        self._first_sample_id = state["next_sample_id"]


def as_rows(
    prompts: Sequence[Prompt], first_sample_id: int = 0, fixed: FixedResponses | None = None
) -> Prompts:
    """Return one row per prompt, with sample ids starting at `first_sample_id`.

    Rows get their `fixed` responses, if any, else empty ones. Raises UserError if a fixed response
    answers another prompt.
    """
    sample_ids = list(range(first_sample_id, first_sample_id + len(prompts)))
    token_ids = [p.token_ids for p in prompts]
    for sample_id, tokens in zip(sample_ids, token_ids, strict=True):
        if fixed and fixed.differs(sample_id, tokens):
            rule = (
                f"the response to sample {sample_id} must answer its prompt, the file says another"
            )
            remedy = "use the data, seed, shuffle and batch size of the run it is from"
            raise UserError(Problem(KEY, rule, remedy=remedy, colon=True))
    return Prompts(
        sample_ids=sample_ids,
        token_ids=token_ids,
        ground_truths=[p.ground_truth for p in prompts],
        data_sources=[p.data_source for p in prompts],
        responses=[fixed.by_sample_id[i] if fixed else [] for i in sample_ids],
        extra_infos=[p.extra_info for p in prompts],
        messages=[p.messages for p in prompts],
    )
