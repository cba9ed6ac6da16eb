"""Compare a file of fixed responses with the prompts that the sampler will hand out."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from mindspeed_rlxf.config.errors import Problem
from mindspeed_rlxf.data.fixed_responses import FixedResponses, other_prompt_problem
from mindspeed_rlxf.trainer.prompt_source import PromptSource


def find_order_problems(
    fixed: FixedResponses,
    source: PromptSource,
    iterations: int,
    decode: Callable[[list[int]], str],
) -> list[Problem]:
    """Report responses whose prompts differ from those of the next `iterations` batches.

    source: at the position where the run starts; this function advances it
    decode: token ids -> text
    Compares token ids of prompts where the file has them; compares texts with the prompt as
    written and as decoded. A text that is no prompt of the data set is ignored, because it may
    have another form (a chat before its template).
    """
    forms: list[set[str]] = []  # of each prompt of the data set: as written, and as decoded
    if fixed.texts:
        forms = [{p.text, decode(p.token_ids.tolist())} for p in source.prompts]
    known = set().union(*forms)
    wrong = []
    for sample_id, index in _number_samples(source, iterations):
        text = fixed.texts.get(sample_id) if fixed.texts else None
        is_other = text in known and text not in forms[index]
        if is_other or fixed.differs(sample_id, source.prompts[index].token_ids):
            wrong.append(sample_id)
    return [other_prompt_problem(wrong[0], len(wrong))] if wrong else []


def _number_samples(source: PromptSource, iterations: int) -> Iterator[tuple[int, int]]:
    """Draw the prompts of all iterations; yield (sample id, index of its prompt) in run order."""
    for _ in range(iterations):
        source.next_prompts()
        taken = source.pop_consumed()
        rows = (index for index in taken.prompts for _ in range(taken.samples_per_prompt))
        yield from enumerate(rows, taken.first_sample_id)
