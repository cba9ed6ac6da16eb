"""Test all-reduces inside each host, between pairs of hosts and over all hosts, by a deadline."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

from mindspeed_rlxf.ops.doctor.findings import Finding, error, ok, warning
from mindspeed_rlxf.ops.doctor.hunt import Group, Hunt, Outcome, Party, Rounds

INSIDE_S, ROUND_S = 40.0, 15.0  # longest round: the first one loads libraries and opens devices
LEAST_ROUND_S = 2.0  # with less time than this left, no round is begun
SHOWN_NAMES = 8


class Transport(Protocol):
    """Runs all-reduces among ranks; tests use simulated ranks."""

    def run(self, groups: Sequence[tuple[int, ...]], timeout_s: float) -> list[Outcome]:
        """Run one all-reduce in each group, all groups at once; wait for the results.

        groups: rank numbers; no rank is in two groups
        Returns one outcome per group, in order. Waits `timeout_s` at most, and beyond that only for
        new processes in place of those that did not reply.
        """


class Conductor:
    """Runs the rounds of hunts through a transport, until `deadline_s` from its construction."""

    def __init__(
        self, transport: Transport, deadline_s: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._transport, self._clock = transport, clock
        self._end = clock() + deadline_s

    def run_round(self, groups: Sequence[Group], longest_s: float) -> list[Outcome] | None:
        """Run one all-reduce per group; return one outcome per group, in order.

        Gives the transport `longest_s`, or the time until the deadline if that is less.
        Returns None, and runs nothing, if less than LEAST_ROUND_S is left before the deadline.
        """
        left = self._end - self._clock()
        if left < LEAST_ROUND_S:
            return None
        ranks = [tuple(rank for party in group for rank in party.ranks) for group in groups]
        return self._transport.run(ranks, min(longest_s, left))

    def run_hunts(self, hunts: Sequence[Hunt]) -> None:
        """Run the hunts side by side, one round of all at a time, until they end or time is up.

        Each hunt keeps its own outcomes. Groups of different hunts must share no rank.
        """
        running = [hunt.rounds() for hunt in hunts]
        wanted = [next(rounds, []) for rounds in running]
        while any(wanted):
            outcomes = self.run_round([group for groups in wanted for group in groups], ROUND_S)
            if outcomes is None:
                return
            rest = iter(outcomes)
            for i, groups in enumerate(wanted):
                if groups:
                    wanted[i] = _next_groups(running[i], [next(rest) for _ in groups])


def _next_groups(rounds: Rounds, outcomes: Sequence[Outcome]) -> list[Group]:
    """Send a round's outcomes to a hunt; return its next groups, [] if it has ended."""
    try:
        return rounds.send(outcomes)
    except StopIteration:
        return []


def check_collectives(
    hosts: Sequence[Party],
    transport: Transport,
    deadline_s: float,
    clock: Callable[[], float] = time.monotonic,
) -> list[Finding]:
    """Run all-reduces inside each host, between pairs and over all; report failing hosts and links.

    hosts: one party per host, with the host's ranks; those that fail inside are not paired, but
           searched for the devices at fault
    No round is begun after `deadline_s`; the last one may end later (`Transport.run`). If that
    deadline leaves no time to begin, there is one warning.
    """
    conductor = Conductor(transport, deadline_s, clock)
    inside = conductor.run_round([(host,) for host in hosts], INSIDE_S)
    if inside is None:
        return [
            warning("collectives.inside", "no time was left to begin", "give a later --deadline")
        ]
    failed = {host: o for host, o in zip(hosts, inside, strict=True) if not o.passed}
    within = {host: Hunt(_ranks_of(host)) for host in failed}
    conductor.run_hunts(list(within.values()))
    found = [_inside_finding(host, outcome, within[host]) for host, outcome in failed.items()]
    working = [host for host in hosts if host not in failed]
    if working:
        found.append(ok("collectives.inside", f"{len(working)} of {len(hosts)} hosts"))
    if len(working) < 2:
        return found
    hunt = Hunt(working)
    conductor.run_hunts([hunt])
    return [*found, *_pair_findings(hunt), *_all_findings(hunt, len(working))]


def _ranks_of(host: Party) -> list[Party]:
    return [Party(f"device {i} of {host.name}", (rank,)) for i, rank in enumerate(host.ranks)]


def _inside_finding(host: Party, outcome: Outcome, hunt: Hunt) -> Finding:
    """Return an error: all-reduce fails inside `host`; name the devices if `hunt` found them.

    outcome: of the all-reduce over all devices of the host
    """
    verdict = hunt.verdict()
    named = [party.name for party in verdict.broken]
    named += [" with ".join(party.name for party in link) for link in verdict.links]
    culprits = f": {', '.join(named)}" if named else ""
    return error(
        "collectives.inside",
        f"all-reduce fails inside {host.name}{culprits}{_format_cause(outcome)}",
        "look at the devices and the library's log there, or leave the host out",
    )


def _pair_findings(hunt: Hunt) -> Iterator[Finding]:
    """Yield an error per host, per link and per undecided pair that failed.

    If any pair passed, `ok` with the number of pairs that were tried comes last.
    """
    check, verdict = "collectives.pairs", hunt.verdict()
    for party in verdict.broken:
        yield error(
            check,
            f"{party.name} fails with every partner{_format_cause(hunt.last_failure(party))}",
            "look at its network, firewall and GLOO/HCCL_SOCKET_IFNAME, or leave it out",
        )
    for link in verdict.links:
        yield error(
            check,
            f"{_join_names(link)} fail together, each is fine with others",
            "look at the way between them: routes, firewall, cable, switch port",
        )
    for group in verdict.undecided:
        if len(group) == 2:
            yield error(
                check,
                f"{_join_names(group)} fail together, and no good host is left to compare with",
                "look at firewall and GLOO/HCCL_SOCKET_IFNAME of both",
            )
    if verdict.any_pair_passed:
        yield ok(check, f"{verdict.num_pairs} pairs of hosts tried")


def _all_findings(hunt: Hunt, count: int) -> Iterator[Finding]:
    """Yield an error for each group of three or more hosts that fails although its halves pass.

    Then `ok` with the number of hosts that passed together, if any, and a warning if the deadline
    came before the end of the search.
    (Pairs that fail are findings of the links between hosts.)
    count: number of hosts that passed the test inside the host
    """
    check, verdict = "collectives.all", hunt.verdict()
    for group in verdict.undecided:
        if len(group) != 2:
            yield error(
                check,
                f"{len(group)} hosts together fail, none of their halves does: "
                f"{_join_names(group)}",
                "look at `ulimit -n`, local ports and memory: what grows with their number",
            )
    if verdict.num_together:
        yield ok(check, f"{verdict.num_together} of {count} hosts together")
    if not verdict.complete:
        yield warning(
            check,
            "the deadline came before all was tried",
            "mend what was found, or give a later --deadline",
        )


def _join_names(group: Group) -> str:
    """Join the names of two or more parties: `a, b and c`.

    Over SHOWN_NAMES, only the first ones are listed, with the number of the others at the end.
    """
    names = [party.name for party in group]
    if len(names) > SHOWN_NAMES:
        names[SHOWN_NAMES:] = [f"{len(names) - SHOWN_NAMES} more"]
    return f"{', '.join(names[:-1])} and {names[-1]}"


def _format_cause(outcome: Outcome) -> str:
    """Return ` (absent ranks; first error)` of a failed outcome; "" if neither is known.

    Shows SHOWN_NAMES ranks at most.
    """
    absent = ", ".join(map(str, outcome.absent[:SHOWN_NAMES]))
    parts = [f"ranks {absent} never came" if absent else "", outcome.cause]
    known = "; ".join(filter(None, parts))
    return f" ({known})" if known else ""
