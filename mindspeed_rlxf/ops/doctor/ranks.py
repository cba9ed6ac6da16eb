"""Run all-reduces in the processes of a Ray cluster."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from mindspeed_rlxf.cluster.errors import HostError
from mindspeed_rlxf.cluster.host_agent import collect_outcomes
from mindspeed_rlxf.config.enums import DeviceKind
from mindspeed_rlxf.ops.doctor.all_reduce import Task, all_reduce, open_store, warm_up
from mindspeed_rlxf.ops.doctor.hunt import Outcome

if TYPE_CHECKING:
    from mindspeed_rlxf.cluster.ray.agent import RayAgent

START_S = 30.0  # of a process in place of one that was ended
MARGIN_S = 2.0  # a rank's deadline is earlier than the driver's, as its message has more detail


class RayRanks:
    """Implements `collectives.Transport`: rank i is `processes[i]`, `ips[i]` its node's address."""

    def __init__(self, kind: DeviceKind, processes: Sequence[RayAgent], ips: Sequence[str]) -> None:
        self._kind, self.processes, self._ips = kind, list(processes), list(ips)
        self._dead: set[int] = set()  # did not start again

    def run(self, groups: Sequence[tuple[int, ...]], timeout_s: float) -> list[Outcome]:
        """Run an all-reduce in each group, all at once; return one outcome per group, in order.

        Processes that fail to reply are replaced, which may take START_S beyond `timeout_s`. A
        group with a process whose replacement did not start either fails without a try.
        """
        alive = [group for group in groups if self._dead.isdisjoint(group)]
        found = dict(zip(alive, self._run_alive(alive, timeout_s), strict=True))
        return [
            found.get(group)
            or Outcome(
                False, tuple(sorted(self._dead & set(group))), "the process does not start again"
            )
            for group in groups
        ]

    def _run_alive(self, groups: Sequence[tuple[int, ...]], timeout_s: float) -> list[Outcome]:
        """Run an all-reduce in each group, all at once; return one outcome per group, in order.

        groups: of processes that run; the first of each group opens the group's store. If it
                cannot, the group fails with that process as absent
        Waits for about `timeout_s`, then replaces the processes that did not reply and waits up to
        START_S for the new ones.
        """
        started = time.monotonic()
        opening = [
            self.processes[leader].start(open_store, self._ips[leader], timeout_s=timeout_s / 3)
            for leader, *_ in groups
        ]
        ports = dict(zip(groups, collect_outcomes(opening), strict=True))
        left = max(timeout_s - (time.monotonic() - started), MARGIN_S)
        limit = max(left - MARGIN_S, 1.0)
        calls = {}
        for group, port in ports.items():
            if isinstance(port, HostError):
                continue
            for rank, number in enumerate(group):
                task = Task(self._kind, self._ips[group[0]], port, rank, len(group), limit)
                calls[number] = self.processes[number].start(all_reduce, task, timeout_s=left)
        replies = dict(zip(calls, collect_outcomes(list(calls.values())), strict=True))
        replies |= {group[0]: port for group, port in ports.items() if isinstance(port, HostError)}
        lost = [number for number, reply in replies.items() if isinstance(reply, HostError)]
        self._replace(lost)
        return [
            Outcome(False, (group[0],), port.cause)
            if isinstance(port, HostError)
            else _merge_replies(group, replies)
            for group, port in ports.items()
        ]

    def end(self) -> None:
        """End all processes."""
        for process in self.processes:
            process.end()

    def _replace(self, numbers: Sequence[int]) -> None:
        """End the processes of these ranks, start new ones and wait until they are ready.

        Records the ranks whose process does not start as dead.
        """
        processes = [self.processes[number] for number in numbers]
        for process in processes:
            process.end()
        calls = [process.start(warm_up, timeout_s=START_S) for process in processes]
        replies = zip(numbers, collect_outcomes(calls), strict=True)
        self._dead |= {n for n, reply in replies if isinstance(reply, HostError)}


def _merge_replies(group: tuple[int, ...], replies: dict[int, Any]) -> Outcome:
    """Merge the replies of a group's processes into one outcome; it passed if all of them did.

    replies: Outcome or HostError by process number
    A failed outcome has the numbers of the processes that did not come or died, and one cause, the
    first of: a process that died, an error that a process reported, a process that was late.
    """
    own = {number: replies[number] for number in group}
    lost = {n: reply for n, reply in own.items() if isinstance(reply, HostError)}
    failed = [o for o in own.values() if isinstance(o, Outcome) and not o.passed]
    if not lost and not failed:
        return Outcome(True)
    dead = {n: reply for n, reply in lost.items() if not reply.is_late}
    absent = {group[rank] for outcome in failed for rank in outcome.absent}
    ranked: list[Any] = [*dead.values(), *failed, *lost.values()]
    causes = [each.cause for each in ranked]
    return Outcome(False, tuple(sorted(absent | set(dead))), next(filter(None, causes), ""))
