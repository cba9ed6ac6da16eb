"""Check that fixed responses belong to the prompts that the sampler will draw."""

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
    """Compare the prompts of fixed responses with those of the next `iterations` batches.

    Returns [] if they agree, else one problem with the first sample that differs and the number of
    all such samples.
    source: at the position where the run starts; it is advanced by `iterations` batches
    decode: token ids -> text
    Token ids of a prompt in the file must be equal to those of the sample's prompt. A text must be
    that prompt as written or as decoded; a text that is no prompt of the data set is ignored, as it
    may be a chat before its template.
    """
    forms: list[set[str]] = []  # texts of each prompt of the data set: as written, and as decoded
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
    """Draw the prompts of `iterations` batches; yield (sample id, index of its prompt) in order.

    A prompt comes once for each of its samples. Advances `source`.
    """
    for _ in range(iterations):
        source.next_prompts()
        taken = source.pop_consumed()
        rows = (index for index in taken.prompts for _ in range(taken.samples_per_prompt))
        yield from enumerate(rows, taken.first_sample_id)
