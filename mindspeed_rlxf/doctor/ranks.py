"""All-reduces among the processes of a Ray cluster: the transport of real checks."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from mindspeed_rlxf.config.enums import DeviceKind
from mindspeed_rlxf.doctor.all_reduce import Task, all_reduce, open_store, warm_up
from mindspeed_rlxf.doctor.hunt import Outcome
from mindspeed_rlxf.runtime.errors import LateReply
from mindspeed_rlxf.runtime.ray_survey import Process, cause, gather, is_failure

START_S = 30.0  # of a process in place of one that was ended
MARGIN_S = 2.0  # a rank's own deadline passes before that of the driver: it has more to say


class RayRanks:
    """Implements `collectives.Transport`. Rank i is process i."""

    def __init__(self, kind: DeviceKind, processes: Sequence[Process]) -> None:
        self._kind, self.processes = kind, list(processes)
        self._dead: set[int] = set()  # did not start again

    def run(self, groups: Sequence[tuple[int, ...]], timeout_s: float) -> list[Outcome]:
        """A process that does not come back is replaced: what it waits for may never come."""
        if any(self._dead & set(group) for group in groups):
            return self._without_the_dead(groups, timeout_s)
        started = time.monotonic()
        leaders = [self.processes[group[0]] for group in groups]
        opening = [process.call(open_store, process.node.ip) for process in leaders]
        ports = gather(opening, timeout_s / 3)
        left = max(timeout_s - (time.monotonic() - started), MARGIN_S)
        calls, ours = [], []
        for group, port, leader in zip(groups, ports, leaders, strict=True):
            if is_failure(port):
                continue
            for rank, number in enumerate(group):
                limit = max(left - MARGIN_S, 1.0)
                task = Task(self._kind, leader.node.ip, port, rank, len(group), limit)
                calls.append(self.processes[number].call(all_reduce, task))
                ours.append(number)
        replies = dict(zip(ours, gather(calls, left), strict=True))
        outcomes = [
            self._failed_leader(group, port) if is_failure(port) else _together(group, replies)
            for group, port in zip(groups, ports, strict=True)
        ]
        lost = [n for n, reply in replies.items() if is_failure(reply)]
        lost += [g[0] for g, port in zip(groups, ports, strict=True) if is_failure(port)]
        self._replace(lost)
        return outcomes

    def end(self) -> None:
        for process in self.processes:
            process.end()

    def _without_the_dead(
        self, groups: Sequence[tuple[int, ...]], timeout_s: float
    ) -> list[Outcome]:
        alive = [group for group in groups if not self._dead & set(group)]
        outcomes = iter(self.run(alive, timeout_s) if alive else [])
        return [
            Outcome(False, 0.0, tuple(sorted(dead)), "the process does not start again")
            if (dead := self._dead & set(group))
            else next(outcomes)
            for group in groups
        ]

    def _replace(self, numbers: Sequence[int]) -> None:
        """Returns when the new ones are there: the next round is not about their start."""
        for number in numbers:
            self.processes[number] = self.processes[number].again()
        replies = gather([self.processes[n].call(warm_up) for n in numbers], START_S)
        self._dead |= {n for n, r in zip(numbers, replies, strict=True) if is_failure(r)}

    @staticmethod
    def _failed_leader(group: tuple[int, ...], failure: Any) -> Outcome:
        return Outcome(False, 0.0, (group[0],), cause(failure))


def _together(group: tuple[int, ...], replies: dict[int, Any]) -> Outcome:
    """The slowest rank counts; of failures, first the processes that did not come back."""
    own = [replies[number] for number in group]
    lost = tuple(n for n, reply in zip(group, own, strict=True) if is_failure(reply))
    told = [reply for reply in own if isinstance(reply, Outcome)]
    failed = [outcome for outcome in told if not outcome.passed]
    if not lost and not failed:
        return Outcome(True, max(outcome.seconds for outcome in told))
    absent = {group[rank] for outcome in failed for rank in outcome.absent}
    dead = [n for n in lost if not isinstance(replies[n], LateReply)]
    said = cause(replies[dead[0]]) if dead else next((o.said for o in failed), "")
    if not said and lost:
        said = cause(replies[lost[0]])
    return Outcome(False, 0.0, tuple(sorted(absent | set(dead))), said)
