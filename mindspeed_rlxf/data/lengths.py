"""Refuse, drop or cut prompts that are longer than the limit."""

from __future__ import annotations

import logging
from typing import TypeVar

import numpy as np

from mindspeed_rlxf.config.enums import OverlongPrompts
from mindspeed_rlxf.data.files import FileProblems, fault

logger = logging.getLogger(__name__)

KEPT = {
    OverlongPrompts.KEEP_HEAD: "first",
    OverlongPrompts.KEEP_TAIL: "last",
    OverlongPrompts.KEEP_ENDS: "first and last",
}
"""Policy that cuts prompts -> which tokens it keeps."""
NO_TOKEN = fault(
    "a prompt must have a token, the tokenizer makes none of this one", "remove the row"
)

Ids = TypeVar("Ids", list[int], np.ndarray[tuple[int, ...], np.dtype[np.int64]])


def cut(token_ids: Ids, max_length: int, policy: OverlongPrompts) -> Ids | None:
    """Return `max_length` of the token ids, or None if the policy is not one that cuts.

    `token_ids` must be longer than `max_length`. KEEP_HEAD keeps the first ids, so that a chat
    loses the header of the response; KEEP_TAIL the last ones, so that a prompt may lose its
    beginning-of-text token. KEEP_ENDS keeps the first max_length // 2 ids and the rest from the
    end.
    """
    if policy is OverlongPrompts.KEEP_HEAD:
        return token_ids[:max_length]
    if policy is OverlongPrompts.KEEP_TAIL:
        return token_ids[-max_length:]
    if policy is OverlongPrompts.KEEP_ENDS:
        head, tail = token_ids[: max_length // 2], token_ids[-(max_length - max_length // 2) :]
        return np.concatenate([head, tail]) if isinstance(head, np.ndarray) else head + tail
    return None


class LengthLimit:
    """Applies `max_prompt_length` to one file or data set, and counts the prompts over it."""

    def __init__(self, name: str, max_length: int, policy: OverlongPrompts) -> None:
        self._name, self._max_length, self._policy = name, max_length, policy
        self._num_over = 0

    def fit(self, row: int, token_ids: Ids, problems: FileProblems) -> Ids | None:
        """Return a prompt's ids: unchanged up to the limit, cut over it; None if not kept.

        Prompts without ids, and those over the limit with the policy ERROR, are added to `problems`
        and not kept. With the other policies, those over the limit are counted, then dropped or
        cut.
        """
        length = len(token_ids)
        if length == 0:
            problems.add(row, NO_TOKEN)
            return None
        if length <= self._max_length:
            return token_ids
        if self._policy is OverlongPrompts.ERROR:
            limit = f"actor_rollout.max_prompt_length={self._max_length}"
            rule = f"a prompt must fit {limit}, this one has {length} tokens"
            problems.add(row, fault(rule, "raise it or set data.overlong_prompts=drop"))
            return None
        self._num_over += 1
        return cut(token_ids, self._max_length, self._policy)

    def report(self, num_rows: int, problems: FileProblems) -> None:
        """Log how many of `num_rows` prompts were over the limit, and whether dropped or cut.

        Logs nothing if there are none. If all `num_rows` were dropped, adds a problem of the whole
        file to `problems` instead.
        """
        if not self._num_over:
            return
        count = f"{self._num_over} of {num_rows} prompts are over {self._max_length} tokens"
        dropped = self._policy is OverlongPrompts.DROP
        if dropped and self._num_over == num_rows:
            problems.add(
                0, fault(f"{count} and none is left", "raise actor_rollout.max_prompt_length")
            )
            return
        done = "dropped" if dropped else f"cut to their {KEPT[self._policy]} {self._max_length}"
        key = f"data.overlong_prompts={self._policy.value}"
        logger.warning("%s: %s and %s (%s)", self._name, count, done, key)
