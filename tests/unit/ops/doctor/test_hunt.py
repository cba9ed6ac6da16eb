"""Bad hosts and links of a simulated cluster, 64 hosts of 8 ranks, are named in few rounds."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import pytest

from mindspeed_rlxf.ops.doctor.collectives import check_collectives
from mindspeed_rlxf.ops.doctor.findings import Finding, Status
from mindspeed_rlxf.ops.doctor.hunt import Outcome, Party, pair_rounds

PER_HOST = 8


class Simulated:
    """Ranks in one process, and a clock: a group fails when it holds a rank or a pair that hangs.

    dead:     ranks
    links:    pairs of ranks that do not reach each other
    too_many: groups of more hosts than this fail
    """

    def __init__(
        self,
        dead: Sequence[int] = (),
        links: Sequence[tuple[int, int]] = (),
        too_many: int = 10**6,
    ) -> None:
        self.dead = set(dead)
        self.links: dict[int, set[int]] = defaultdict(set)
        for a, b in links:
            self.links[a].add(b)
        self.too_many, self.now, self.num_rounds = too_many, 0.0, 0

    def clock(self) -> float:
        return self.now

    def run(self, groups: Sequence[tuple[int, ...]], timeout_s: float) -> list[Outcome]:
        ranks = [rank for group in groups for rank in group]
        assert len(ranks) == len(set(ranks)), "a rank is in two groups"
        assert groups and all(groups)
        outcomes = [self.outcome(set(group)) for group in groups]
        failed = any(not outcome.passed for outcome in outcomes)
        self.now += timeout_s if failed else 2.0  # seconds; 2 to open the connections
        self.num_rounds += 1
        return outcomes

    def outcome(self, group: set[int]) -> Outcome:
        absent = tuple(sorted(group & self.dead))
        cut = any(self.links[rank] & group for rank in group & self.links.keys())
        if absent or cut or len({rank // PER_HOST for rank in group}) > self.too_many:
            return Outcome(False, absent, "timed out")
        return Outcome(True)


def host(i: int) -> list[int]:
    return list(range(i * PER_HOST, (i + 1) * PER_HOST))


def hosts(count: int) -> list[Party]:
    return [Party(f"host-{i}", tuple(host(i))) for i in range(count)]


def between(a: int, b: int) -> list[tuple[int, int]]:
    """All ranks of two hosts."""
    return list(itertools.product(host(a), host(b)))


def check(cluster: Simulated, count: int = 64, deadline_s: float = 300.0) -> list[Finding]:
    found = check_collectives(hosts(count), cluster, deadline_s, cluster.clock)
    assert cluster.now <= deadline_s
    return found


def bad(found: list[Finding]) -> list[str]:
    return [f"{f.check}: {f.value}" for f in found if f.status is not Status.OK]


@pytest.mark.parametrize("count", range(2, 70))
def test_pairs_of_a_round_are_disjoint_and_everyone_meets_someone(count: int) -> None:
    parties = hosts(count)
    rounds = pair_rounds(parties)
    assert len(rounds) == (count - 1).bit_length()
    for pairs in rounds:
        there = [party for pair in pairs for party in pair]
        assert len(there) == len(set(there))
    assert {p for pairs in rounds for pair in pairs for p in pair} == set(parties)


def test_64_hosts_of_a_power_of_two_meet_six_partners_each() -> None:
    met = [pair for pairs in pair_rounds(hosts(64)) for pair in pairs]
    assert len(met) == len(set(met)) == 6 * 32


def test_a_sound_cluster_takes_eight_rounds() -> None:
    cluster = Simulated()
    found = check(cluster)
    assert bad(found) == [] and cluster.num_rounds == 1 + 6 + 1
    assert [f.value for f in found] == [
        "64 of 64 hosts",
        "192 pairs of hosts tried",
        "64 of 64 hosts together",
    ]


def cut_off(*which: int, count: int = 64) -> list[tuple[int, int]]:
    """Links of hosts that work inside and reach no other host."""
    others = [i for i in range(count) if i not in which]
    pairs = [pair for a in which for b in others for pair in between(a, b)]
    return pairs + [p for a, b in itertools.combinations(which, 2) for p in between(a, b)]


DEAD = "collectives.inside: all-reduce fails inside host-1: device 3 of host-1 (ranks 11 never came"
MANY_CUT_OFF = [(0,), (63,), (0, 1), (5, 21, 40), tuple(range(0, 16, 2))]
BISECTED = [(3, 60), (0, 63), (30, 33)]  # differ in more than one bit: no pair tries them


@pytest.mark.parametrize(
    ("fault", "count", "expected", "most_rounds"),
    [
        *(({"dead": [host(1)[3]]}, count, [DEAD], 20) for count in (2, 3, 5, 64)),
        *(
            ({"links": cut_off(*which)}, 64, [f"host-{i} fails with every" for i in which], 10)
            for which in MANY_CUT_OFF
        ),
        *(
            ({"links": cut_off(2, count=count)}, count, ["host-2 fails with every partner"], 10)
            for count in (3, 4, 7)
        ),
        ({"links": between(0, 1)}, 2, ["host-0 and host-1 fail together, and no good host"], 10),
        ({"links": between(8, 9)}, 64, ["host-8 and host-9 fail together, each is fine"], 11),
        ({"links": [(host(8)[2], host(9)[5])]}, 64, ["host-8 and host-9 fail together"], 11),
        *(
            ({"links": between(a, b)}, 64, [f"host-{a} and host-{b} fail together"], 21)
            for a, b in BISECTED
        ),
        ({"too_many": 40}, 64, ["collectives.all: 64 hosts together fail, none of their"], 20),
    ],
)
def test_faults_are_named_and_nothing_else(
    fault: dict[str, Any], count: int, expected: list[str], most_rounds: int
) -> None:
    cluster = Simulated(**fault)
    found = [line.removeprefix("collectives.pairs: ") for line in bad(check(cluster, count))]
    assert len(found) == len(expected)
    assert all(map(str.startswith, found, expected)), found
    assert cluster.num_rounds <= most_rounds


def test_a_host_that_is_found_costs_no_further_waits() -> None:
    """Two rounds of pairs fail, 15 s each; 2 s for each of the six others."""
    cluster = Simulated(links=cut_off(0))
    check(cluster)
    assert cluster.now == 2 * 15 + 6 * 2


def test_faults_of_several_kinds_at_once_stay_within_the_deadline() -> None:
    links = [*cut_off(11), *between(3, 60), *between(20, 51)]
    cluster = Simulated(dead=[host(40)[0]], links=links)
    told = bad(check(cluster))
    assert "inside host-40: device 0 of host-40" in told[0]
    assert "host-11 fails with every partner" in told[1]
    assert cluster.now <= 300


def test_when_nobody_reaches_anybody_the_rounds_stay_bounded() -> None:
    everyone = cut_off(*range(64))
    cluster = Simulated(links=everyone)
    found = check(cluster)
    assert cluster.num_rounds <= 1 + 6 + 2 and any("fail together" in line for line in bad(found))


def test_an_early_deadline_reports_the_findings_so_far() -> None:
    cluster = Simulated(links=between(3, 60))
    told = bad(check(cluster, deadline_s=40))
    assert told[-1].startswith("collectives.all: the deadline came before all was tried")


def test_no_round_is_begun_without_time() -> None:
    cluster = Simulated()
    (found,) = bad(check(cluster, deadline_s=1.0))
    assert found.endswith("no time was left to begin") and cluster.num_rounds == 0


def test_a_host_of_one_rank_is_named_without_a_device() -> None:
    cluster = Simulated(dead=[0])
    parties = [Party("host-0", (0,)), Party("host-1", (8,))]
    (found,) = bad(check_collectives(parties, cluster, 300.0, cluster.clock))
    assert found.startswith("collectives.inside: all-reduce fails inside host-0 (ranks 0 never")
