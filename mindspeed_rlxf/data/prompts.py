"""Load prompt data sets: tokenize the rows of files, or report every problem in one list."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from itertools import islice
from typing import TYPE_CHECKING, Any

from mindspeed_rlxf.config.problems import Problem, UserError
from mindspeed_rlxf.config.schema import DataConfig
from mindspeed_rlxf.data.files import FileProblems, fault
from mindspeed_rlxf.data.prompt_rows import LengthLimit, TextRow, read_text_rows, text_problem
from mindspeed_rlxf.data.prompt_store import Labels, Prompt, PromptStore
from mindspeed_rlxf.data.tokenizer import SpecialTokens

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

__all__ = ["Prompt", "load_prompts", "num_appended_eos"]
logger = logging.getLogger(__name__)

ENCODE_CHUNK = 1024  # texts per tokenizer call; fast tokenizers share a call between threads


def load_prompts(
    files: str | Sequence[str],
    tokenizer: PreTrainedTokenizerBase,
    data: DataConfig,
    max_prompt_length: int,
) -> PromptStore:
    """Load all prompts of `files`, in order; no files give no prompts.

    A prompt is a string, tokenized as `tokenizer(text, add_special_tokens=True)` without the EOS
    some tokenizers append, or a list of chat messages, put through the tokenizer's chat template
    with the generation prompt. Special tokens that the texts of rows spell are read as text unless
    `data.allow_special_tokens`; those that the template writes are tokens. Prompts over
    `max_prompt_length` tokens are problems, or are dropped or truncated (`data.overlong_prompts`).
    With `data.invalid_rows=drop`, rows with a problem are dropped if their file can be read to its
    end and keeps a row. The log counts both. Raises UserError with the problems of all files.
    """
    names = [files] if isinstance(files, str) else list(files)
    reader = _Reader(tokenizer, data, max_prompt_length)
    problems: list[Problem] = []
    prompts = PromptStore()
    for name in names:
        of_rows, size_before = FileProblems(name), len(prompts)
        of_file: list[Problem] = []
        try:
            for labels, text, token_ids in reader.read(name, of_rows):
                prompts.add(text, token_ids, labels)
        except UserError as error:
            of_file = list(error.problems)
        prompts.end_part()
        found, num_kept = of_rows.list_problems(), len(prompts) - size_before
        if not (found or of_file or num_kept):
            rule = "a data file must hold at least one row, this one is empty"
            of_file = [Problem(name, rule, remedy="fill or drop it", colon=True)]
        if found and num_kept and not of_file and data.invalid_rows == "drop":
            for problem in found:
                logger.warning("dropped: %s", problem)
            rows = of_rows.count_rows()
            logger.warning("%s: %d rows dropped (data.invalid_rows=drop)", name, rows)
            continue
        problems += found + of_file
    if problems:
        raise UserError(problems)
    return prompts


class _Reader:
    """Tokenizes the prompts of files, a chunk of rows at a time."""

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, data: DataConfig, max_prompt_length: int
    ) -> None:
        self._tokenizer, self._data, self._max_length = tokenizer, data, max_prompt_length
        self._num_eos = num_appended_eos(tokenizer)
        self._special = SpecialTokens(tokenizer)

    def read(self, file: str, problems: FileProblems) -> Iterator[tuple[Labels, str, list[int]]]:
        """Yield (labels, text, token ids) of each prompt that is kept.

        The text of a truncated prompt is decoded from the ids that remain. Invalid rows are added
        to `problems`.
        """
        limit = LengthLimit(file, self._max_length, self._data.overlong_prompts)
        rows, num_rows, num_spelled = read_text_rows(file, self._data, problems), 0, 0
        while chunk := list(islice(rows, ENCODE_CHUNK)):
            num_rows += len(chunk)
            good: list[TextRow] = []
            for row in chunk:
                if not self._data.allow_special_tokens:
                    num_spelled += self._special.are_in(row.prompt)
                if problem := self._fill_template(row):
                    problems.add(row.row, problem)
                else:
                    good.append(row)
            for row, token_ids in zip(good, self._tokenize(good), strict=True):
                kept = limit.fit(row.row, token_ids, problems)
                if kept is token_ids:
                    yield row.labels, self._special.restore(row.text), kept
                elif kept is not None:
                    yield row.labels, str(self._tokenizer.decode(kept)), kept
        limit.report(num_rows, problems)
        if num_spelled:
            logger.warning(
                "%s: %d of %d prompts spell special tokens of the tokenizer, which are read as "
                "text; data.allow_special_tokens=true reads them as tokens",
                file,
                num_spelled,
                num_rows,
            )

    def _fill_template(self, row: TextRow) -> Problem | None:
        """Set `text` of a row; return its problem if it cannot be tokenized."""
        row.text = str(row.prompt)
        if isinstance(row.prompt, list):
            hides = not self._data.allow_special_tokens
            given: Any = self._special.hide(row.prompt) if hides else row.prompt
            # A parquet column has every key in every message, null if the writer gave none.
            messages = [{k: v for k, v in m.items() if v is not None} for m in given]
            try:
                row.text = str(
                    self._tokenizer.apply_chat_template(
                        messages,
                        tokenize=False,
                        add_generation_prompt=True,
                        **self._data.chat_template_kwargs,
                    )
                )
            except Exception as error:  # of any type, because a template is a program
                reason = (str(error).splitlines() or [type(error).__name__])[0]
                remedy = "give the tokenizer's folder a fitting one, or write the prompt as text"
                rule = f"the tokenizer's chat template must accept the messages: {reason}"
                return fault(rule, remedy)
        return text_problem(row.text)

    def _tokenize(self, rows: list[TextRow]) -> list[list[int]]:
        """Return the token ids of each row, without an EOS that the tokenizer appends."""
        encoded: dict[int, list[int]] = {}
        for is_chat in (False, True):
            alike = [row for row in rows if isinstance(row.prompt, list) is is_chat]
            split = not (self._data.allow_special_tokens or is_chat)
            texts, num_eos = [row.text for row in alike], 0 if is_chat else self._num_eos
            all_ids = _token_ids(self._tokenizer, texts, not is_chat, split)
            for row, ids in zip(alike, all_ids, strict=True):
                encoded[row.row] = ids[: len(ids) - num_eos]
                if is_chat and self._special.restore(row.text) != row.text:
                    encoded[row.row] = self._special.token_ids(row.text)
        return [encoded[row.row] for row in rows]


def _token_ids(
    tokenizer: PreTrainedTokenizerBase, texts: list[str], add_special_tokens: bool, split: bool
) -> list[list[int]]:
    if not texts:
        return []
    ids: list[list[int]] = tokenizer(
        texts, add_special_tokens=add_special_tokens, split_special_tokens=split
    )["input_ids"]
    return ids


def num_appended_eos(tokenizer: PreTrainedTokenizerBase) -> int:
    """Count the EOS tokens that the tokenizer appends to a text: 0, or 1 for some tokenizers."""
    (plain,), (framed,) = (_token_ids(tokenizer, ["a"], add, split=False) for add in (False, True))
    return int(framed[-1:] == [tokenizer.eos_token_id] != plain[-1:])
