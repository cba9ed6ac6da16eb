"""Roles whose methods succeed, fail, wait or die, for tests of runtimes."""

import os
import signal
import time
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from mindspeed_rlxf.data.batch import RoleOutput, Rows


@dataclass(frozen=True)
class Numbers(Rows):
    """Rows with one number each."""

    numbers: torch.Tensor  # [batch] int64


@dataclass(frozen=True)
class Fetched:
    """The rows that a rank got from a rows reference."""

    numbers: list[int]
    total: int  # sum of the numbers of all ranks


@dataclass(frozen=True)
class Inputs:
    """An argument with rows in a field."""

    rows: Any
    name: str


class StandIn:
    """A role without a model. offset: what `make` adds to its numbers"""

    def __init__(self, offset: int = 0) -> None:
        self.offset = offset
        self.returned: torch.Tensor | None = None  # by `double_in_place`

    def rank(self) -> RoleOutput:
        return RoleOutput(report=(dist.get_rank(), dist.get_world_size()))

    def nap(self, seconds: float) -> RoleOutput:
        time.sleep(seconds)
        return RoleOutput()

    def make(self, numbers: Numbers) -> RoleOutput:
        return RoleOutput(Numbers(numbers.numbers + self.offset))

    def double_in_place(self, rows: Numbers) -> RoleOutput:
        """Double the rows in place; return them, and report the largest. Change the last ones."""
        rows.numbers.mul_(2)
        if self.returned is not None:
            self.returned.zero_()
        self.returned = rows.numbers
        return RoleOutput(rows, int(rows.numbers.max()))

    def read(self, rows: Numbers) -> RoleOutput:
        total = rows.numbers.sum()
        dist.all_reduce(total)
        return RoleOutput(report=Fetched(rows.numbers.tolist(), int(total)))

    def read_both(self, inputs: Inputs, more: Numbers) -> RoleOutput:
        return RoleOutput(report=[inputs.name, inputs.rows.numbers.tolist(), more.numbers.tolist()])

    def make_late(self, numbers: Numbers, seconds: float, until: str = "") -> RoleOutput:
        """Return rows after some seconds, or as soon as the file `until` exists."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline and not os.path.exists(until):
            time.sleep(0.02)
        return RoleOutput(numbers)

    def make_one_late(self, numbers: Numbers, rank: int, seconds: float) -> RoleOutput:
        """Return rows, on one rank after some seconds, on the others at once."""
        return self.make_late(numbers, seconds if dist.get_rank() == rank else 0.0)

    def fail_on(self, rank: int) -> RoleOutput:
        """Raise ValueError on one rank while the others wait for it in a barrier."""
        if dist.get_rank() == rank:
            raise ValueError("a bad number")
        dist.barrier()
        return RoleOutput()

    def enter_barrier(self, rank: int) -> RoleOutput:
        """Let one rank enter the barrier in which the others wait after `fail_on`."""
        if dist.get_rank() == rank:
            dist.barrier()
        return RoleOutput()

    def fail_alone(self, rank: int) -> RoleOutput:
        if dist.get_rank() == rank:
            raise ValueError("only here")
        return RoleOutput()

    def fail_with_rows(self, numbers: Numbers) -> RoleOutput:
        raise ValueError("no rows today")

    def die_on(self, rank: int) -> RoleOutput:
        """Kill one rank by SIGKILL while the others wait for it in a barrier."""
        if dist.get_rank() == rank:
            os.kill(os.getpid(), 9)
        dist.barrier()
        return RoleOutput()

    def stop_on(self, rank: int) -> RoleOutput:
        """Stop one rank by SIGSTOP while the others wait for it in a barrier."""
        if dist.get_rank() == rank:
            os.kill(os.getpid(), signal.SIGSTOP)
        dist.barrier()
        return RoleOutput()

    def process(self) -> RoleOutput:
        return RoleOutput(report=os.getpid())

    def environment(self, name: str) -> RoleOutput:
        return RoleOutput(report=os.environ.get(name))

    def say(self, text: str) -> RoleOutput:
        """Print the text from Python, and a line to file descriptor 2 without Python's streams."""
        print(text)
        os.write(2, b"from C\n")
        return RoleOutput()


class Unbuildable:
    """A role whose constructor raises ValueError."""

    def __init__(self) -> None:
        raise ValueError("no such model")
