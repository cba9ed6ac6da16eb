"""Compare a file of fixed responses with the prompts that the sampler will hand out."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from mindspeed_rlxf.config.errors import Problem
from mindspeed_rlxf.data.fixed_responses import FixedResponses, other_prompt_problem
from mindspeed_rlxf.data.prompts import Prompt
from mindspeed_rlxf.trainer.prompt_source import PromptSource


def order_problems(
    fixed: FixedResponses,
    source: PromptSource,
    iterations: int,
    decode: Callable[[list[int]], str],
) -> list[Problem]:
    """Report responses whose prompts differ from those of the next `iterations` batches.

    source: at the position where the run starts; this function advances it
    decode: token ids -> text
    Compares token ids of prompts where the file has them, else texts: with the prompt as written
    and as decoded. A text that is no prompt of the data set is ignored, because it has another
    form (a chat before its template).
    """
    texts = _Texts(source, decode) if fixed.texts else None
    wrong = [
        sample_id
        for sample_id, index in _samples(source, iterations)
        if fixed.differs(sample_id, source.prompts[index].token_ids)
        or (texts and texts.differs(fixed.texts.get(sample_id), index))
    ]
    return [other_prompt_problem(wrong[0], len(wrong))] if wrong else []


def _samples(source: PromptSource, iterations: int) -> Iterator[tuple[int, int]]:
    """(sample id, index of its prompt) in the order of the run."""
    for _ in range(iterations):
        source.next_prompts()
        taken = source.pop_consumed()
        rows = (index for index in taken.prompts for _ in range(taken.samples_per_prompt))
        yield from enumerate(rows, taken.first_sample_id)


class _Texts:
    """The texts of all prompts of the data set: as written, and as decoded."""

    def __init__(self, source: PromptSource, decode: Callable[[list[int]], str]) -> None:
        self._written = [_forms(prompt, decode) for prompt in source.prompts]
        self._known = set().union(*self._written)

    def differs(self, text: str | None, index: int) -> bool:
        """Whether `text` is another prompt of the data set than the one at `index`."""
        return text in self._known and text not in self._written[index]


def _forms(prompt: Prompt, decode: Callable[[list[int]], str]) -> set[str]:
    return {prompt.text, decode(prompt.token_ids.tolist())}
