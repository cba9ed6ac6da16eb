"""Check that fixed responses belong to the prompts that the sampler will draw."""

from __future__ import annotations

from collections.abc import Iterator

from mindspeed_rlxf.config.errors import Problem
from mindspeed_rlxf.data.fixed_responses import KEY, FixedResponses
from mindspeed_rlxf.trainer.prompt_source import PromptSource


def find_order_problems(
    fixed: FixedResponses, source: PromptSource, iterations: int
) -> list[Problem]:
    """Compare the prompts of fixed responses with those of the next `iterations` batches.

    Returns [] if they agree, else one problem with the first sample that differs and the number of
    all such samples.
    source: at the position where the run starts; it is advanced by `iterations` batches
    """
    wrong = [
        sample_id
        for sample_id, index in _number_samples(source, iterations)
        if fixed.differs(sample_id, source.prompts[index].token_ids)
    ]
    if not wrong:
        return []
    rule = f"the response to sample {wrong[0]} must answer its prompt, the file says another"
    rule = f"{rule} ({len(wrong)} samples differ)"
    remedy = "use the data, seed, shuffle and batch size of the run it is from"
    return [Problem(KEY, rule, remedy=remedy, colon=True)]


def _number_samples(source: PromptSource, iterations: int) -> Iterator[tuple[int, int]]:
    """Draw the prompts of `iterations` batches; yield (sample id, index of its prompt) in order.

    A prompt comes once for each of its samples. Advances `source`.
    """
    for _ in range(iterations):
        source.next_prompts()
        taken = source.pop_consumed()
        rows = (index for index in taken.prompts for _ in range(taken.samples_per_prompt))
        yield from enumerate(rows, taken.first_sample_id)
