"""Count tokens and FLOPs of training engine passes in this process, until `take` is called."""

from typing import NamedTuple

# Operations of a pass, in those of a forward pass; frozen weights have no gradients.
FORWARD = 1
TRAIN = 3
ADAPT = 2


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
    tokens = sum(work.tokens for work in _done)
    flops = sum(work.flops for work in _done)
    _done.clear()
    return Work(tokens, flops)
