"""Results from host checks: the doctor shows all, and a starting worker raises some."""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import Enum


class Status(str, Enum):
    """A check's status, from best to worst; the values appear in the doctor's JSON."""

    OK = "ok"
    WARNING = "warning"
    ERROR = "error"


@dataclass(frozen=True)
class Finding:
    """One check's result.

    Attributes:
        check: stable name, `area.subject`.
        value: what was measured or seen.
        remedy: what to do; "" if ok.
        hosts: hosts with this result; empty = the command's host.
    """

    check: str
    status: Status
    value: str
    remedy: str = ""
    hosts: tuple[str, ...] = ()

    def on(self, host: str) -> Finding:
        """Return a copy naming this one host."""
        return replace(self, hosts=(host,))


def ok(check: str, value: str) -> Finding:
    """Return a finding without a problem."""
    return Finding(check, Status.OK, value)


def warning(check: str, value: str, remedy: str) -> Finding:
    """Return a warning."""
    return Finding(check, Status.WARNING, value, remedy)


def error(check: str, value: str, remedy: str) -> Finding:
    """Return an error."""
    return Finding(check, Status.ERROR, value, remedy)


def judge(fine: bool, check: str, value: str, remedy: str, bad: Status = Status.WARNING) -> Finding:
    """Return an `ok` finding if `fine`, else one with status `bad` and the remedy."""
    return ok(check, value) if fine else Finding(check, bad, value, remedy)
