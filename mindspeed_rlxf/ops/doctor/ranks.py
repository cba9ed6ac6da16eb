"""All-reduces among the processes of a Ray cluster: the transport of real checks."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from mindspeed_rlxf.cluster.errors import HostError
from mindspeed_rlxf.cluster.host_agent import outcomes
from mindspeed_rlxf.config.enums import DeviceKind
from mindspeed_rlxf.ops.doctor.all_reduce import Task, all_reduce, open_store, warm_up
from mindspeed_rlxf.ops.doctor.hunt import Outcome

if TYPE_CHECKING:
    from mindspeed_rlxf.cluster.ray.agent import RayAgent

START_S = 30.0  # of a process in place of one that was ended
MARGIN_S = 2.0  # a rank's own deadline passes before that of the driver: it has more to say


class RayRanks:
    """Implements `collectives.Transport`. Rank i is process i, on the node with address i."""

    def __init__(self, kind: DeviceKind, processes: Sequence[RayAgent], ips: Sequence[str]) -> None:
        self._kind, self.processes, self._ips = kind, list(processes), list(ips)
        self._dead: set[int] = set()  # did not start again

    def run(self, groups: Sequence[tuple[int, ...]], timeout_s: float) -> list[Outcome]:
        """A process that does not come back is replaced: what it waits for may never come."""
        if any(self._dead & set(group) for group in groups):
            return self._without_the_dead(groups, timeout_s)
        started = time.monotonic()
        leaders = [group[0] for group in groups]
        opening = [
            self.processes[n].start(open_store, self._ips[n], timeout_s=timeout_s / 3)
            for n in leaders
        ]
        ports = outcomes(opening)
        left = max(timeout_s - (time.monotonic() - started), MARGIN_S)
        calls, ours = [], []
        for group, port in zip(groups, ports, strict=True):
            if isinstance(port, HostError):
                continue
            for rank, number in enumerate(group):
                limit = max(left - MARGIN_S, 1.0)
                task = Task(self._kind, self._ips[group[0]], port, rank, len(group), limit)
                calls.append(self.processes[number].start(all_reduce, task, timeout_s=left))
                ours.append(number)
        replies = dict(zip(ours, outcomes(calls), strict=True))
        found = [
            Outcome(False, 0.0, (group[0],), port.cause)
            if isinstance(port, HostError)
            else _together(group, replies)
            for group, port in zip(groups, ports, strict=True)
        ]
        lost = [n for n, reply in replies.items() if isinstance(reply, HostError)]
        lost += [n for n, port in zip(leaders, ports, strict=True) if isinstance(port, HostError)]
        self._replace(lost)
        return found

    def end(self) -> None:
        for process in self.processes:
            process.end()

    def _without_the_dead(
        self, groups: Sequence[tuple[int, ...]], timeout_s: float
    ) -> list[Outcome]:
        alive = [group for group in groups if not self._dead & set(group)]
        found = iter(self.run(alive, timeout_s) if alive else [])
        return [
            Outcome(False, 0.0, tuple(sorted(dead)), "the process does not start again")
            if (dead := self._dead & set(group))
            else next(found)
            for group in groups
        ]

    def _replace(self, numbers: Sequence[int]) -> None:
        """Returns when the new ones are there: the next round is not about their start."""
        processes = [self.processes[number] for number in numbers]
        for process in processes:
            process.end()
        calls = [process.start(warm_up, timeout_s=START_S) for process in processes]
        replies = zip(numbers, outcomes(calls), strict=True)
        self._dead |= {n for n, reply in replies if isinstance(reply, HostError)}


def _together(group: tuple[int, ...], replies: dict[int, Any]) -> Outcome:
    """The slowest rank counts; of failures, first the processes that did not come back."""
    own = {number: replies[number] for number in group}
    lost = {n: reply for n, reply in own.items() if isinstance(reply, HostError)}
    told = [reply for reply in own.values() if isinstance(reply, Outcome)]
    failed = [outcome for outcome in told if not outcome.passed]
    if not lost and not failed:
        return Outcome(True, max(outcome.seconds for outcome in told))
    absent = {group[rank] for outcome in failed for rank in outcome.absent}
    dead = [n for n, reply in lost.items() if not reply.is_late]
    said = lost[dead[0]].cause if dead else next((o.said for o in failed), "")
    said = said or next((reply.cause for reply in lost.values()), "")
    return Outcome(False, 0.0, tuple(sorted(absent | set(dead))), said)
