"""Read pairs with a better and a worse response to the same prompt, as token ids.

A row is {prompt, chosen, rejected}: the prompt is text or chat messages, the responses are text.
Files are parquet or jsonl, such as `rm/train.parquet` made by full_hh_rlhf.py.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mindspeed_rlxf.config.enums import OverlongPrompts
from mindspeed_rlxf.config.problems import Problem, UserError
from mindspeed_rlxf.config.schema import DataConfig
from mindspeed_rlxf.data.prompts import load_prompts

SIDES = ("chosen", "rejected")


@dataclass(frozen=True)
class Pair:
    """Token ids for the prompt followed by each of the two responses."""

    chosen: list[int]
    rejected: list[int]


class Pairs:
    """A file's pairs. Prompts are tokenized at once, a response when its pair is read.

    A prompt is tokenized as in PPO, a response followed by EOS. Too long prompts lose their start,
    too long responses their end with the EOS. A pair whose responses are equal then is dropped.

    Attributes:
        num_equal: Pairs that were dropped.
    """

    def __init__(
        self, file: str, tokenizer: Any, max_prompt_length: int, max_response_length: int
    ) -> None:
        """Raises UserError for a file that cannot be read, and for rows without two responses."""
        data = DataConfig(
            train_files=(file,),
            default_data_source="pairs",
            extra_columns=SIDES,
            overlong_prompts=OverlongPrompts.KEEP_TAIL,
        )
        self._prompts = load_prompts(file, tokenizer, data, max_prompt_length)
        self._tokenizer, self._max_response_length = tokenizer, max_response_length
        for prompt in self._prompts:
            if rule := _broken_rule([prompt.extra_info.get(side) for side in SIDES]):
                where = f"pair {prompt.index + 1} of {file}"
                raise UserError(Problem(where, rule, remedy="repair or remove the row"))
        self._kept = [prompt.index for prompt in self._prompts if self._differs(prompt.extra_info)]
        self.num_equal = len(self._prompts) - len(self._kept)
        if not self._kept:
            rule = f"the responses of all pairs are equal within {max_response_length} tokens"
            raise UserError(Problem(file, rule, remedy="raise --max-response-length", colon=True))

    def _differs(self, texts: Mapping[str, str]) -> bool:
        chosen, rejected = (self._response_ids(texts[side]) for side in SIDES)
        return chosen != rejected

    def __len__(self) -> int:
        return len(self._kept)

    def __getitem__(self, index: int) -> Pair:
        prompt = self._prompts[self._kept[index]]
        start = prompt.token_ids.tolist()
        return Pair(*(start + self._response_ids(prompt.extra_info[side]) for side in SIDES))

    def _response_ids(self, text: str) -> list[int]:
        """Tokenize a response with EOS; names of special tokens in it are treated as text."""
        ids: list[int] = self._tokenizer(text, add_special_tokens=False, split_special_tokens=True)[
            "input_ids"
        ]
        return [*ids, self._tokenizer.eos_token_id][: self._max_response_length]


def _broken_rule(texts: Sequence[Any]) -> str:
    """Return the rule that the two responses break, "" = none."""
    if not all(isinstance(text, str) and text.strip() for text in texts):
        return "must have texts chosen and rejected"
    return "must have two different responses" if texts[0] == texts[1] else ""
