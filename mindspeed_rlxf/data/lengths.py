"""Refuse, drop or cut prompts that are longer than the limit."""

from __future__ import annotations

import logging
from typing import TypeVar

import numpy as np

from mindspeed_rlxf.config.enums import OverlongPrompts
from mindspeed_rlxf.config.errors import Problem
from mindspeed_rlxf.data.files import FileProblems, fault

logger = logging.getLogger(__name__)

KEPT = {
    OverlongPrompts.KEEP_HEAD: "first",
    OverlongPrompts.KEEP_TAIL: "last",
    OverlongPrompts.KEEP_ENDS: "first and last",
}
"""Policy that cuts prompts -> which tokens it keeps."""
CUTTING = tuple(KEPT)
MOST_CHARACTERS = 2**20  # of a text that is tokenized to learn its length
CHARACTERS_PER_TOKEN = 256  # no vocabulary has longer tokens
NO_TOKEN = fault(
    "a prompt must have a token, the tokenizer makes none of this one", "remove the row"
)

Ids = TypeVar("Ids", list[int], np.ndarray[tuple[int, ...], np.dtype[np.int64]])


def most_characters(max_length: int) -> int:
    """Return the number of characters above which a text counts as over `max_length` tokens."""
    return max(MOST_CHARACTERS, CHARACTERS_PER_TOKEN * max_length)


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
        return _join(token_ids[: max_length // 2], token_ids[-(max_length - max_length // 2) :])
    return None


def _join(head: Ids, tail: Ids) -> Ids:
    if isinstance(head, np.ndarray):
        return np.concatenate([head, tail])
    return head + tail


class LengthLimit:
    """Applies `max_prompt_length` to one file or data set, and counts the prompts over it."""

    def __init__(self, name: str, max_length: int, policy: OverlongPrompts) -> None:
        self._name, self._max_length, self._policy = name, max_length, policy
        self._most_characters = most_characters(max_length)
        self._num_over = 0

    def may_fit(self, row: int, num_characters: int, problems: FileProblems) -> bool:
        """Whether to tokenize a prompt: True if it may be within the limit, or the policy cuts.

        One that is surely too long by its number of characters is counted as dropped, or added to
        `problems` with the policy ERROR.
        """
        if num_characters <= self._most_characters or self._policy in CUTTING:
            return True
        if self._policy is OverlongPrompts.ERROR:
            problems.add(row, self._too_long(f"{num_characters} characters"))
        else:
            self._num_over += 1
        return False

    def cut_text(self, text: str) -> str:
        """Shorten a text that is cut anyway, without a change of the tokens that are kept.

        Keeps the first `_most_characters` characters for KEEP_HEAD, the last for other policies,
        and both for KEEP_ENDS. A shorter text is returned as it is.
        """
        most = self._most_characters
        if self._policy is OverlongPrompts.KEEP_HEAD:
            return text[:most]
        if self._policy is OverlongPrompts.KEEP_ENDS and len(text) > 2 * most:
            return text[:most] + text[-most:]
        return text if self._policy is OverlongPrompts.KEEP_ENDS else text[-most:]

    def _too_long(self, length: str) -> Problem:
        limit = f"actor_rollout.max_prompt_length={self._max_length}"
        return fault(
            f"a prompt must fit {limit}, this one has {length}",
            "raise it or set data.overlong_prompts=drop",
        )

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
            problems.add(row, self._too_long(f"{length} tokens"))
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
