"""Read responses from a file instead of generating them, to compare or replay runs.

Each line is a JSON object with `response_ids` (token ids, EOS included) or `response` (text,
tokenized without special tokens; the first EOS id is appended if max_new_tokens allows). Either
every row has the `sample_id` it answers, as in `samples.jsonl`, or none has, and row i answers
sample i.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from mindspeed_rlxf.config.problems import Problem, UserError, shorten_value
from mindspeed_rlxf.data.files import FileProblems, UnusableRow, fault, read_rows

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

KEY = "actor_rollout.fixed_responses"
FIX_ROW = "repair or remove the row"


@dataclass(frozen=True)
class FixedResponses:
    """Response token ids by sample, and prompt token ids if the file has them."""

    by_sample_id: Mapping[int, list[int]]
    prompts: Mapping[int, list[int]] = field(default_factory=dict)

    def differs(self, sample_id: int, prompt: np.ndarray) -> bool:
        """Whether the file has a prompt for this sample other than `prompt`."""
        answered_prompt = self.prompts.get(sample_id)
        return answered_prompt is not None and answered_prompt != prompt.tolist()


def load_fixed_responses(
    file: str,
    tokenizer: PreTrainedTokenizerBase,
    eos_token_ids: Sequence[int],
    vocab_size: int,
    max_new_tokens: int,
    num_samples: int,
) -> FixedResponses:
    """Load a .jsonl file's responses to `num_samples` samples, and prompts if present.

    Raises:
        UserError: all row problems or, without any, the samples without a response.
    """
    if Path(file).suffix.lower() != ".jsonl":
        raise UserError(Problem(KEY, "must be a .jsonl file", file, "convert or rename it"))
    problems = FileProblems(f"{KEY}: {file}")
    responses: dict[int, list[int]] = {}
    prompts: dict[int, list[int]] = {}
    has_sample_ids: set[bool] = set()  # with both values, only some rows have one
    num_rows = 0
    for number, row in read_rows(file, problems.file):
        if isinstance(row, UnusableRow):
            problems.add(number, row.problem)
            continue
        has_sample_ids.add("sample_id" in row)
        sample_id = row.get("sample_id", num_rows)
        num_rows += 1
        if type(sample_id) is not int or sample_id in responses:
            rule = "a sample_id must be a number that no earlier row has"
            problems.add(number, fault(f"{rule}, not {sample_id!r:.40}", FIX_ROW))
            continue
        responses[sample_id] = []  # so that its id is taken, even if the response is wrong
        try:
            ids = _read_response(row, tokenizer, eos_token_ids, vocab_size, max_new_tokens)
        except ValueError as error:
            problems.add(number, fault(str(error), FIX_ROW))
            continue
        responses[sample_id] = ids
        if "prompt_ids" in row:
            prompts[sample_id] = row["prompt_ids"]
    if len(has_sample_ids) > 1:
        problems.add(0, fault("all rows or none must have a sample_id", "complete or remove them"))
    missing_ids = [sample_id for sample_id in range(num_samples) if sample_id not in responses]
    if missing_ids and not problems.list_problems():
        rule = f"the run's {num_samples} samples must have a response each"
        rule = f"{rule}, {len(missing_ids)} have none (the first: {missing_ids[0]})"
        remedy = "lower training.train_iters, or complete the file "
        remedy += "(logging.samples=all writes every response of a run)"
        problems.add(0, fault(rule, remedy))
    problems_with_rows = problems.list_problems()
    if problems_with_rows:
        raise UserError(problems_with_rows)
    return FixedResponses(responses, prompts)


def _read_response(
    row: Mapping[str, Any],
    tokenizer: PreTrainedTokenizerBase,
    eos: Sequence[int],
    vocab_size: int,
    max_new_tokens: int,
) -> list[int]:
    """Return `response_ids`, or the tokenized `response` with an EOS if there is room."""
    ids = row.get("response_ids")
    if "response_ids" not in row:
        if not isinstance(row.get("response"), str):
            raise ValueError("a row must have response_ids or a string `response`")
        ids = tokenizer(row["response"], add_special_tokens=False)["input_ids"]
        if len(ids) < max_new_tokens and not (ids and ids[-1] in eos):
            ids = ids + list(eos[:1])
    if not isinstance(ids, list) or not all(type(i) is int for i in ids):
        raise ValueError(f"response_ids must be a list of token ids, not {ids!r:.40}")
    if not 1 <= len(ids) <= max_new_tokens:
        rule = f"a response must have 1 to {max_new_tokens} tokens (max_new_tokens)"
        raise ValueError(f"{rule}, not {len(ids)}")
    for token_id in ids:
        if not 0 <= token_id < vocab_size:
            wrong = shorten_value(token_id)
            raise ValueError(f"token ids must be from 0 to {vocab_size - 1}, not {wrong}")
    for token_id in ids[:-1]:
        if token_id in eos:
            raise ValueError(f"EOS must be the last token, {token_id} is in the middle")
    return ids
