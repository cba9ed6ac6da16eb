"""Sample scoring outcomes: a result, or a failure with its cause."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from mindspeed_rlxf.rewards.rules import RewardResult


class Cause(str, Enum):
    """Why a sample has no score; names the metric `reward/failed_<cause>`."""

    TIMEOUT = "timeout"  # no score within reward.timeout_s
    EXCEPTION = "exception"  # the function raised
    NOT_FINITE = "not_finite"  # it returned NaN or inf
    WRONG_RESULT = "wrong_result"  # it returned something that is no score
    EXIT = "exit"  # it called exit() or crashed its process
    MEMORY = "memory"  # it needs more than reward.worker_memory_gib
    REMOTE = "remote"  # the server of a url did not score it

    @property
    def is_outside(self) -> bool:
        """Whether the response is not to blame: its sample is then masked, not punished."""
        return self in (Cause.EXIT, Cause.REMOTE)


class ScoreFailure(Exception):
    """A sample without a score."""

    def __init__(self, cause: Cause, message: str) -> None:
        super().__init__(message)
        self.cause = cause
        self.message = message


class ScoringBroken(RuntimeError):
    """Scoring itself does not work, so no sample can be scored."""


@dataclass(frozen=True)
class Sample:
    """Reward function inputs; `extra_info` has the other columns in the sample's row."""

    prompt: str
    response: str
    ground_truth: str
    data_source: str
    extra_info: dict[str, Any] = field(default_factory=dict)

    @property
    def solution_str(self) -> str:
        """The response, by verl's name."""
        return self.response


@dataclass(frozen=True)
class Outcome:
    """A result, or a failure's cause, message and details (function and traceback)."""

    result: RewardResult | None
    cause: Cause | None = None
    message: str = ""
    details: str = ""

    def to_json(self) -> dict[str, Any]:
        """Return the outcome in JSON types."""
        result = None
        if self.result is not None:
            result = {"score": self.result.score, "parts": dict(self.result.parts)}
        return {
            "result": result,
            "cause": self.cause,
            "message": self.message,
            "details": self.details,
        }

    @classmethod
    def from_json(cls, saved: Mapping[str, Any]) -> Outcome:
        """Restore what `to_json` has returned."""
        result = RewardResult(**saved["result"]) if saved["result"] is not None else None
        cause = Cause(saved["cause"]) if saved["cause"] is not None else None
        return cls(result, cause, saved["message"], saved["details"])


def to_result(value: Any) -> RewardResult:
    """Convert a reward function's return value: a number, or a dict with a number as `score`.

    None, also as `score`, means that the function does not apply to the sample. Other entries are
    numbers, text or None, which is left out.

    Raises:
        ScoreFailure: It is something else, or not finite.
    """
    if value is None:
        return RewardResult(None)
    if not isinstance(value, dict):
        return RewardResult(_to_finite_number("the result", value))
    if "score" not in value:
        keys = ", ".join(map(repr, list(value)[:8])) or "nothing"
        raise ScoreFailure(Cause.WRONG_RESULT, f"a dict must have `score`, it has {keys}")
    score = value["score"]
    if score is not None:
        score = _to_finite_number("'score'", score)
    parts: dict[str, float | str] = {}
    for name, entry in value.items():
        if name == "score" or entry is None:
            continue
        if isinstance(entry, str):
            parts[str(name)] = entry
        else:
            parts[str(name)] = _to_finite_number(f"{name!r}", entry)
    return RewardResult(score, parts)


def _to_finite_number(name: str, value: Any) -> float:
    try:
        if isinstance(value, (str, bytes, bytearray)):
            raise TypeError
        number = float(value)
    except (TypeError, ValueError, OverflowError, RuntimeError):
        rule = f"{name} must be a number, it is {type(value).__name__} {value!r:.60}"
        raise ScoreFailure(Cause.WRONG_RESULT, rule) from None
    if not math.isfinite(number):
        raise ScoreFailure(Cause.NOT_FINITE, f"{name} must be finite, it is {number}")
    return number
