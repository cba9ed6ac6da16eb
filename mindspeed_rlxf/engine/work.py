"""Count the work in training engine passes in this process, until `take` is called."""

from typing import NamedTuple

# Operations of a pass, in those of a forward pass; frozen weights have no gradients.
FORWARD, TRAIN, ADAPT = 1, 3, 2


class Work(NamedTuple):
    """Tokens, without padding, and floating-point operations."""

    tokens: int = 0
    flops: int = 0


NONE = Work()
_done: list[Work] = []


def add(work: Work) -> None:
    """Add a whole replica's work in a pass; called by its leader alone."""
    _done.append(work)


def take() -> Work:
    """Return the work since the last call."""
    found = Work(*map(sum, zip(*_done, strict=True))) if _done else NONE
    _done.clear()
    return found
