"""Which of many parties breaks collectives: few rounds of disjoint groups, planned without I/O.

A round is a list of groups that are tried at the same time; no party is in two of them.
1. Pairs: in round k, party i meets party i XOR 2^k, so that log2(n) rounds cross every level of a
   tree of switches.
2. Doubts: a party that passed with nobody meets others that are known to be good; a pair that
   failed though both its parties passed elsewhere is tried again.
3. All that is left together. When that fails, halves are tried at once; when both halves pass, the
   fault lies between them, and quarters are crossed: 2 log2(n) rounds lead to the pair.
"""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Generator, Sequence
from dataclasses import dataclass, field

SLOW_FACTOR = 3.0  # times the median of all pairs
SLOW_EXTRA_S = 0.05  # and at least this much more than it
FEWEST_TO_COMPARE = 3  # pairs, for a median that says something
CONFIRM_ROUNDS = 2
FAILURES_WITH_GOOD = 2  # partners that are good elsewhere, until a party is condemned
WHOLE_HUNTS = 3  # faults that only show with everyone together, looked for one after the other


@dataclass(frozen=True)
class Party:
    """One that takes part: a host with all its ranks, or a single rank."""

    name: str
    ranks: tuple[int, ...]


Group = tuple[Party, ...]
Rounds = Generator[list[Group], "Sequence[Outcome]", None]


@dataclass(frozen=True)
class Outcome:
    """What became of a group. absent: ranks that never came; said: the first error."""

    passed: bool
    seconds: float = 0.0
    absent: tuple[int, ...] = ()
    said: str = ""


@dataclass
class Verdict:
    """broken: fail with everyone; slow: slow with everyone; links: pairs that fail, or are slow,
    though both parties are good elsewhere; undecided: groups that fail, no smaller part is known.
    """

    broken: list[Party] = field(default_factory=list)
    slow: list[Party] = field(default_factory=list)
    links: list[Group] = field(default_factory=list)
    slow_links: list[Group] = field(default_factory=list)
    undecided: list[Group] = field(default_factory=list)
    pair_s: float | None = None  # median of the pairs that passed
    all_s: float | None = None  # everyone together
    num_pairs: int = 0
    num_together: int = 0  # parties that passed together
    complete: bool = False  # False: the deadline came first


def pair_rounds(parties: Sequence[Party]) -> list[list[Group]]:
    """Disjoint pairs: log2(n) rounds, rounded up; who has no partner in a round takes another."""
    count = len(parties)
    rounds: list[list[Group]] = []
    for bit in range(max(count - 1, 0).bit_length()):
        pairs, alone = [], []
        for i in range(count):
            partner = i ^ (1 << bit)
            if partner >= count:
                alone.append(i)
            elif i < partner:
                pairs.append((i, partner))
        pairs += zip(alone[::2], alone[1::2], strict=False)
        rounds.append([(parties[a], parties[b]) for a, b in pairs])
    return rounds


class Hunt:
    """`rounds` yields groups and is sent their outcomes; `verdict` can be asked at any time."""

    def __init__(self, parties: Sequence[Party]) -> None:
        self._parties = list(parties)
        self._pairs: list[tuple[Group, Outcome]] = []
        self._tries: dict[Party, list[tuple[Party, Outcome]]] = {p: [] for p in parties}
        self._slow_limit = float("inf")  # seconds
        self._links: list[Group] = []  # found by trying everyone together
        self._whole: list[Group] = []
        self._all_s: float | None = None
        self._num_together, self._complete = 0, False

    def rounds(self) -> Rounds:
        for pairs in pair_rounds(self._parties):
            condemned = self._condemned(failing=True)
            yield from self._try([p for p in pairs if not condemned & set(p)])
        for _ in range(CONFIRM_ROUNDS):
            doubts = self._doubts()
            if doubts:
                yield from self._try(doubts)
        yield from self._together()
        self._complete = True

    def verdict(self) -> Verdict:
        broken = self._condemned(failing=True)
        slow = self._condemned(failing=False) - broken
        links: list[Group] = []
        slow_links: list[Group] = []
        undecided: list[Group] = []
        for pair in dict.fromkeys(pair for pair, _ in self._pairs):
            if (broken | slow) & set(pair) or self._is_good(self._last(pair)):
                continue
            lonely = not all(self._good_partners(party) for party in pair)
            if lonely and not self._last(pair).passed:
                undecided.append(pair)
            elif not lonely:
                (slow_links if self._last(pair).passed else links).append(pair)
        passed = [outcome.seconds for _, outcome in self._pairs if outcome.passed]
        return Verdict(
            broken=[p for p in self._parties if p in broken],
            slow=[p for p in self._parties if p in slow],
            links=list(dict.fromkeys([*links, *self._links])),
            slow_links=slow_links,
            undecided=[*undecided, *self._whole],
            pair_s=statistics.median(passed) if passed else None,
            all_s=self._all_s,
            num_pairs=len({pair for pair, _ in self._pairs}),
            num_together=self._num_together,
            complete=self._complete,
        )

    def evidence(self, party: Party) -> Outcome | None:
        """The last failure of a party, for the message."""
        failed = [o for pair, o in self._pairs if party in pair and not o.passed]
        return failed[-1] if failed else None

    # -- what is known -------------------------------------------------------------------------

    def _try(self, groups: list[Group]) -> Rounds:
        if not groups:
            return
        outcomes = yield groups
        for pair, outcome in zip(groups, outcomes, strict=True):
            self._pairs.append((pair, outcome))
            self._tries[pair[0]].append((pair[1], outcome))
            self._tries[pair[1]].append((pair[0], outcome))
        self._slow_limit = self._limit()

    def _limit(self) -> float:
        """By the fastest try of each pair: a host that is busy for a moment is not slow."""
        fastest: dict[Group, float] = {}
        for pair, outcome in self._pairs:
            if outcome.passed:
                fastest[pair] = min(outcome.seconds, fastest.get(pair, outcome.seconds))
        if len(fastest) < FEWEST_TO_COMPARE:
            return float("inf")
        median = statistics.median(fastest.values())
        return max(SLOW_FACTOR * median, median + SLOW_EXTRA_S)

    def _is_good(self, outcome: Outcome) -> bool:
        return outcome.passed and outcome.seconds <= self._slow_limit

    def _last(self, pair: Group) -> Outcome:
        return next(o for found, o in reversed(self._pairs) if found == pair)

    def _good_partners(self, party: Party) -> set[Party]:
        return {partner for partner, outcome in self._tries[party] if self._is_good(outcome)}

    def _condemned(self, failing: bool) -> set[Party]:
        """Those that were good with nobody, and bad with enough that are good elsewhere.

        failing: bad means failed; else slow counts too
        """
        good = {party for party in self._parties if self._good_partners(party)}
        enough = min(FAILURES_WITH_GOOD, len(self._parties) - 1)
        found = set()
        for party in self._parties:
            bad = {
                partner
                for partner, outcome in self._tries[party]
                if not (outcome.passed if failing else self._is_good(outcome))
            }
            works = any(o.passed for _, o in self._tries[party]) if failing else party in good
            if not works and len(bad & good) >= enough:
                found.add(party)
        return found

    def _doubts(self) -> list[Group]:
        """Pairs that decide: doubtful parties with good ones they did not meet, pairs again."""
        condemned = self._condemned(failing=True) | self._condemned(failing=False)
        good = [party for party in self._parties if self._good_partners(party)]
        taken: set[Party] = set()
        groups: list[Group] = []
        for party in self._parties:
            if party in condemned or party in good:
                continue
            met = {partner for partner, _ in self._tries[party]}
            helper = next((g for g in good if g not in taken | met), None)
            if helper is not None:
                taken |= {party, helper}
                groups.append((party, helper))
        counted = Counter(pair for pair, _ in self._pairs)
        for pair, count in counted.items():
            free = not (taken | condemned) & set(pair) and set(pair) <= set(good)
            if free and count <= CONFIRM_ROUNDS and not self._is_good(self._last(pair)):
                taken |= set(pair)
                groups.append(pair)
        return groups

    # -- everyone together ---------------------------------------------------------------------

    def _together(self) -> Rounds:
        """Without what is known to fail; each fault found on the way is left out, then again."""
        verdict = self.verdict()
        out = set(verdict.broken) | {pair[0] for pair in verdict.links}
        out |= {party for group in verdict.undecided for party in group}
        for _ in range(WHOLE_HUNTS):
            rest: Group = tuple(party for party in self._parties if party not in out)
            if len(rest) < 2:
                return
            (outcome,) = yield [rest]
            if outcome.passed:
                self._all_s, self._num_together = outcome.seconds, len(rest)
                return
            found = yield from _isolate(rest)
            if len(found) != 2:
                self._whole.append(found)
                return
            self._links.append(found)
            out.add(found[0])


def _halves(group: Group) -> tuple[Group, Group]:
    middle = (len(group) + 1) // 2
    return group[:middle], group[middle:]


def _isolate(group: Group) -> Generator[list[Group], Sequence[Outcome], Group]:
    """The smallest part of a failing group that was seen to fail."""
    while len(group) > 2:
        left, right = _halves(group)
        parts = [part for part in (left, right) if len(part) > 1]
        outcomes = yield parts
        failing = [p for p, outcome in zip(parts, outcomes, strict=True) if not outcome.passed]
        if not failing:
            return (yield from _between(left, right))
        group = failing[0]
    return group


def _between(left: Group, right: Group) -> Generator[list[Group], Sequence[Outcome], Group]:
    """As `_isolate`, where each side passes by itself and both together fail."""
    while len(left) + len(right) > 2:
        (a, b), (c, d) = _halves(left), _halves(right)
        failing: list[tuple[Group, Group]] = []
        for crossed in ([(a, c), (b, d)], [(a, d), (b, c)]):
            tried = [sides for sides in crossed if all(sides)]
            if not tried or failing:
                continue
            outcomes = yield [one + other for one, other in tried]
            failing = [s for s, o in zip(tried, outcomes, strict=True) if not o.passed]
        if not failing:
            return left + right
        left, right = failing[0]
    return left + right
