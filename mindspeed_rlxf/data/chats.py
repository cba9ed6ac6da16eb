"""Fill in a tokenizer's chat template, which is a program by the author of the tokenizer's folder.

transformers runs it in a sandbox without access to files and Python, which does not stop endless
loops. So the templates of a call are filled in by a child process with limits of time and memory.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from mindspeed_rlxf.files.bounded import stream_bounded

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

CPU_S, MEMORY_BYTES = 1, 2**30  # for one conversation
MAX_TEXT = 128 * 2**20  # characters of one filled-in conversation
PARALLEL = "TOKENIZERS_PARALLELISM"

Message = dict[str, Any]


def fill_in(
    tokenizer: PreTrainedTokenizerBase,
    conversations: Sequence[Sequence[Message]],
    variables: Mapping[str, Any],
) -> Iterator[tuple[str, str]]:
    """Fill the chat template with each conversation in a child process, and yield the results.

    Yields (text, ""), where the text ends with the generation prompt, or ("", reason) where the
    template refuses the conversation. variables: passed to the template (chat_template_kwargs)
    Raises OutOfBoundsError at the first conversation that exceeds CPU_S, MEMORY_BYTES or
    `files.bounded.WALL_S`.
    """
    if not conversations:
        return
    with _quiet_fork():
        results = stream_bounded(
            lambda: (_fill_one(tokenizer, each, variables) for each in conversations),
            CPU_S,
            MEMORY_BYTES,
        )
        first = next(results)
    yield first
    yield from results


def _fill_one(
    tokenizer: PreTrainedTokenizerBase, messages: Sequence[Message], variables: Mapping[str, Any]
) -> tuple[str, str]:
    """Fill the chat template with one conversation; return (text, "") or ("", reason).

    Catches every error of the template; a text over MAX_TEXT characters is refused too. Fields of
    messages that are None are left out.
    """
    try:
        given = [{k: v for k, v in message.items() if v is not None} for message in messages]
        text = tokenizer.apply_chat_template(
            given, tokenize=False, add_generation_prompt=True, **variables
        )
    except RecursionError:  # its own message depends on the depth of the stack
        return "", "it calls itself without end"
    except Exception as error:  # any type, because the template is a program
        return "", (str(error).splitlines() or [type(error).__name__])[0]
    if len(text) > MAX_TEXT:
        return "", f"it makes a text of {len(text)} characters"
    return str(text), ""


@contextmanager
def _quiet_fork() -> Iterator[None]:
    """Set TOKENIZERS_PARALLELISM=true inside the block, unless it is set: no warning at forks.

    The variable is restored after the block. The warning does not apply: the child only fills in
    templates and tokenizes nothing.
    """
    before = os.environ.get(PARALLEL)
    os.environ.setdefault(PARALLEL, "true")
    try:
        yield
    finally:
        if before is None:
            os.environ.pop(PARALLEL, None)
