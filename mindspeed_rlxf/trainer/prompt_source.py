"""Hand out each iteration's training prompts."""

from __future__ import annotations

from collections.abc import Sequence
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


class PromptSource:
    """Draws training prompts in sampled order, and numbers every sample in the run."""

    def __init__(
        self,
        prompts: Sequence[Prompt],
        sampler: PromptSampler | MixtureSampler,
        n_samples_per_prompt: int,
        fixed: FixedResponses | None = None,
    ) -> None:
        """Start with sample id 0 and no batch drawn.

        Advances `sampler`, which draws indices into `prompts`. `fixed` responses replace
        generation.
        """
        self.prompts, self.sampler, self.fixed = prompts, sampler, fixed
        self.n_samples_per_prompt = n_samples_per_prompt
        self._next_sample_id = 0
        self._taken: list[int] = []
        # Drawn and not returned yet: state of the sampler before, indices, prompts.
        self._ahead: tuple[dict[str, Any], list[int], list[Prompt]] | None = None

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

    def next_prompts(self) -> Prompts:
        """Return the next global batch: `n_samples_per_prompt` consecutive rows for each prompt.

        Takes the batch drawn by `read_ahead`, if any. Numbers the samples, and adds the prompts to
        the next `pop_consumed`.
        """
        _, indices, prompts = self.read_ahead()
        self._ahead = None
        self._taken += indices
        chosen = [prompt for prompt in prompts for _ in range(self.n_samples_per_prompt)]
        batch = as_rows(chosen, self._next_sample_id, self.fixed)
        self._next_sample_id += len(chosen)
        return batch

    def read_ahead(self) -> tuple[dict[str, Any], list[int], list[Prompt]]:
        """Draw and read the next batch of `next_prompts`; `state_dict` does not change."""
        if self._ahead is None:
            before, indices = self.sampler.state_dict(), self.sampler.next_batch()
            self._ahead = before, indices, [self.prompts[i] for i in indices]
        return self._ahead

    def pop_consumed(self) -> ConsumedPrompts:
        """Return the prompts returned by `next_prompts` since the last call.

        As indices, with their first sample id and the samples per prompt.
        """
        indices, self._taken = self._taken, []
        first = self._next_sample_id - len(indices) * self.n_samples_per_prompt
        return ConsumedPrompts(first, self.n_samples_per_prompt, indices)

    def state_dict(self) -> dict[str, Any]:
        """Return {"sampler", "next_sample_id"}: the position after the last returned batch.

        A batch read ahead does not count.
        """
        sampler = self._ahead[0] if self._ahead else self.sampler.state_dict()
        return {"sampler": sampler, "next_sample_id": self._next_sample_id}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the result of `state_dict`."""
        self._ahead = None
        self.sampler.load_state_dict(state["sampler"])
        self._next_sample_id = state["next_sample_id"]


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
