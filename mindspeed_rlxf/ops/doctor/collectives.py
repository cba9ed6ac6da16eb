"""All-reduces inside each host, between pairs of hosts and over all, within one deadline."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from typing import Protocol

from mindspeed_rlxf.ops.doctor.findings import Finding, error, ok, warning
from mindspeed_rlxf.ops.doctor.hunt import Group, Hunt, Outcome, Party, Verdict

INSIDE_S, ROUND_S = 40.0, 15.0  # longest round: the first one loads libraries and opens devices
LEAST_ROUND_S = 2.0  # with less time than this left, no round is begun


class Transport(Protocol):
    """Runs collectives among ranks: real ones, or stand-ins."""

    def run(self, groups: Sequence[tuple[int, ...]], timeout_s: float) -> list[Outcome]:
        """An all-reduce in each group at the same time; no rank is in two groups. Returns within
        about `timeout_s`, with an outcome for each group; seconds are those of the all-reduce."""


class Conductor:
    """Plays hunts against a transport until they end or time is up."""

    def __init__(
        self,
        transport: Transport,
        deadline_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._transport, self._clock = transport, clock
        self._end = clock() + deadline_s
        self.num_rounds = 0

    def round(self, groups: Sequence[Group], longest_s: float) -> list[Outcome] | None:
        """None: no time is left."""
        left = self._end - self._clock()
        if left < LEAST_ROUND_S:
            return None
        self.num_rounds += 1
        ranks = [tuple(rank for party in group for rank in party.ranks) for group in groups]
        return self._transport.run(ranks, min(longest_s, left))

    def play(self, hunts: Sequence[Hunt]) -> None:
        """All hunts in step: their groups share no rank, so that they are tried together."""
        playing = [hunt.rounds() for hunt in hunts]
        wanted = [next(rounds, None) for rounds in playing]
        while any(wanted):
            groups = [group for part in wanted for group in part or []]
            outcomes = self.round(groups, ROUND_S)
            if outcomes is None:
                return
            answers = iter(outcomes)
            for i, part in enumerate(wanted):
                if part is None:
                    continue
                try:
                    wanted[i] = playing[i].send([next(answers) for _ in part])
                except StopIteration:
                    wanted[i] = None


def check_collectives(
    hosts: Sequence[Party],
    transport: Transport,
    deadline_s: float,
    clock: Callable[[], float] = time.monotonic,
) -> list[Finding]:
    """hosts: each with its ranks. Returns within `deadline_s` and the answer to the last round."""
    conductor = Conductor(transport, deadline_s, clock)
    inside = conductor.round([(host,) for host in hosts], INSIDE_S)
    if inside is None:
        remedy = "give a later --deadline"
        return [warning("collectives.inside", "no time was left to begin", remedy)]
    outcomes = dict(zip(hosts, inside, strict=True))
    broken = [host for host, outcome in outcomes.items() if not outcome.passed]
    within = {host: Hunt(_ranks(host)) for host in broken if len(host.ranks) > 1}
    conductor.play(list(within.values()))
    found = _inside_findings(outcomes, within)
    working = [host for host in hosts if host not in broken]
    if len(working) < 2:
        return found
    hunt = Hunt(working)
    conductor.play([hunt])
    return found + pair_findings(hunt) + all_findings(hunt.verdict(), len(working))


def _ranks(host: Party) -> list[Party]:
    return [Party(f"device {i} of {host.name}", (rank,)) for i, rank in enumerate(host.ranks)]


def _inside_findings(outcomes: dict[Party, Outcome], within: dict[Party, Hunt]) -> list[Finding]:
    check, found = "collectives.inside", []
    for host, outcome in outcomes.items():
        if outcome.passed:
            continue
        verdict = within[host].verdict() if host in within else Verdict()
        named = [party.name for party in verdict.broken + verdict.slow]
        named += [" with ".join(p.name for p in link) for link in verdict.links]
        culprits = f": {', '.join(named)}" if named else ""
        value = f"all-reduce fails inside {host.name}{culprits}{_said(outcome)}"
        remedy = "look at the devices and the library's log there, or leave the host out"
        found.append(error(check, value, remedy))
    passed = {host: o.seconds for host, o in outcomes.items() if o.passed}
    if not passed:
        return found
    median = statistics.median(passed.values())
    slow = [h.name for h, s in passed.items() if s > max(3 * median, median + 0.05)]
    if slow:
        value = f"slow inside {', '.join(slow)} (median of all {_ms(median)})"
        remedy = "look for other processes, throttled devices and health there"
        found.append(warning(check, value, remedy))
    return [*found, ok(check, f"{len(passed)} of {len(outcomes)} hosts, median {_ms(median)}")]


def pair_findings(hunt: Hunt) -> list[Finding]:
    """Bad hosts, then bad links; last what passed."""
    check, verdict, found = "collectives.pairs", hunt.verdict(), []
    for party in verdict.broken:
        value = f"{party.name} fails with every partner{_said(hunt.evidence(party))}"
        remedy = "look at its network, firewall and GLOO/HCCL_SOCKET_IFNAME, or leave it out"
        found.append(error(check, value, remedy))
    for party in verdict.slow:
        remedy = "look at link speed, cable, other traffic and processes there"
        found.append(warning(check, f"{party.name} is slow with every partner", remedy))
    for link in verdict.links:
        value = f"{_names(link)} fail together, each is fine with others"
        remedy = "look at the way between them: routes, firewall, cable, switch port"
        found.append(error(check, value, remedy))
    for link in verdict.slow_links:
        value = f"{_names(link)} are slow together, each is fine with others"
        found.append(warning(check, value, "look at the way between them: switch, routes, traffic"))
    for group in verdict.undecided:
        if len(group) == 2:
            value = f"{_names(group)} fail together, and no good host is left to compare with"
            remedy = "look at firewall and GLOO/HCCL_SOCKET_IFNAME of both"
            found.append(error(check, value, remedy))
    if verdict.pair_s is not None:
        value = f"{verdict.num_pairs} pairs of hosts tried, median {_ms(verdict.pair_s)}"
        found.append(ok(check, value))
    return found


def all_findings(verdict: Verdict, count: int) -> list[Finding]:
    """count: hosts that work inside."""
    check, found = "collectives.all", []
    for group in verdict.undecided:
        if len(group) != 2:
            value = f"{len(group)} hosts together fail, none of their halves does: {_names(group)}"
            remedy = "look at `ulimit -n`, local ports and memory: what grows with their number"
            found.append(error(check, value, remedy))
    if verdict.all_s is not None:
        value = f"{verdict.num_together} of {count} hosts together, {_ms(verdict.all_s)}"
        found.append(ok(check, value))
    if not verdict.complete:
        value = "the deadline came before all was tried"
        found.append(warning(check, value, "mend what was found, or give a later --deadline"))
    return found


def _names(group: Group) -> str:
    names = [party.name for party in group]
    if len(names) > 8:
        names = [*names[:8], f"{len(names) - 8} more"]
    return ", ".join(names[:-1]) + f" and {names[-1]}"


def _said(outcome: Outcome | None) -> str:
    """What is known of a failure, in brackets."""
    if outcome is None or not (outcome.absent or outcome.said):
        return ""
    absent = ", ".join(map(str, outcome.absent[:8]))
    parts = [f"ranks {absent} never came"] if absent else []
    return f" ({'; '.join([*parts, *filter(None, [outcome.said])])})"


def _ms(seconds: float) -> str:
    return f"{seconds * 1000:.0f} ms" if seconds < 1 else f"{seconds:.1f} s"
