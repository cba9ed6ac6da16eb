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
    """The problem of responses to other prompts than the next `iterations` batches; empty = none.

    source: at the position where the run starts; it is moved on
    decode: token ids -> text. Token ids of prompts are compared where the file has them. A text is
    compared with the prompt as it was tokenized and as it is decoded; one that is no prompt of the
    data set has another form (a chat before its template) and says nothing.
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
        taken = source.taken()
        rows = (index for index in taken.prompts for _ in range(taken.samples_per_prompt))
        yield from enumerate(rows, taken.first_sample_id)


class _Texts:
    """Every text that a prompt of the data set may be written as."""

    def __init__(self, source: PromptSource, decode: Callable[[list[int]], str]) -> None:
        self._written = [_forms(prompt, decode) for prompt in source.prompts]
        self._known = set().union(*self._written)

    def differs(self, text: str | None, index: int) -> bool:
        """Whether `text` is another prompt of the data set than the one at `index`."""
        return text in self._known and text not in self._written[index]


def _forms(prompt: Prompt, decode: Callable[[list[int]], str]) -> set[str]:
    return {prompt.text, decode(prompt.token_ids.tolist())}
