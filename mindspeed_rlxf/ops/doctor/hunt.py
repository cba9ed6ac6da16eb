"""Find the parties that break all-reduces, in few rounds; plans the rounds and runs nothing.

A party is a host or a rank. A round is a list of groups of parties that are tried at the same
time; no party is in two of them.
1. Pairs: in round k, party i is paired with party i XOR 2^k. log2(n) rounds cross every level of a
   tree of switches.
2. Doubtful pairs: a party that passed with nobody is paired with others that passed. A pair that
   failed, though both its parties passed with others, is tried again.
3. All parties without a known failure, together. If that fails, both halves are tried at once. If
   both pass, the fault lies between them, and quarters of both are combined: 2 log2(n) rounds lead
   to the pair.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Generator, Sequence
from dataclasses import dataclass
from typing import TypeAlias

CONFIRM_ROUNDS = 2
FAILURES_WITH_WORKING = 2  # partners that work elsewhere, until a party counts as broken
MAX_FAULTS_TOGETHER = 3  # faults that only show with all parties together, searched in turn


@dataclass(frozen=True)
class Party:
    """A member of the search: a host with all its ranks, or a single rank."""

    name: str
    ranks: tuple[int, ...]


Group: TypeAlias = tuple[Party, ...]


@dataclass(frozen=True)
class Outcome:
    """Result of one group's all-reduce. absent: ranks that never joined; cause: the first error."""

    passed: bool
    absent: tuple[int, ...] = ()
    cause: str = ""


Rounds: TypeAlias = Generator[list[Group], Sequence[Outcome], None]
"""Yields the groups of a round and is sent their outcomes."""


@dataclass(frozen=True)
class Verdict:
    """Parties and groups that fail.

    broken:          parties that fail with every partner, though enough of these pass with others
    links:           pairs that fail although both parties pass with others
    undecided:       groups that fail, without a known failing pair or party inside
    num_pairs:       pairs tried
    any_pair_passed: at least one pair passed
    num_together:    parties that passed all together; 0 = none did, or that was not tried
    complete:        False = the rounds were not run to their end
    """

    broken: list[Party]
    links: list[Group]
    undecided: list[Group]
    num_pairs: int
    any_pair_passed: bool
    num_together: int
    complete: bool


def pair_rounds(parties: Sequence[Party]) -> list[list[Group]]:
    """Return log2(n) rounds (rounded up) of pairs; no party is in two pairs of a round.

    In round k, party i is paired with party i XOR 2^k; parties whose partner does not exist are
    paired with one another. [] for fewer than two parties.
    """
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
    """A search among `parties`: `rounds` drives it, `verdict` may be called at any time."""

    def __init__(self, parties: Sequence[Party]) -> None:
        self._parties = list(parties)
        self._tries: list[tuple[Group, Outcome]] = []  # of pairs
        self._links: list[Group] = []  # found by trying all together
        self._undecided: list[Group] = []  # likewise
        self._num_together, self._complete = 0, False

    def rounds(self) -> Rounds:
        """Yield the groups of each round, be sent their outcomes, and record them.

        A generator. First the pairs, without parties found broken by then; then CONFIRM_ROUNDS
        times the doubtful pairs; then the parties not at fault all together, in parts if that
        fails. A caller that ends it earlier gets the `verdict` of an incomplete search.
        """
        for pairs in pair_rounds(self._parties):
            broken = self._broken()
            yield from self._try_pairs([pair for pair in pairs if broken.isdisjoint(pair)])
        for _ in range(CONFIRM_ROUNDS):
            yield from self._try_pairs(self._doubtful_pairs())
        yield from self._try_together()
        self._complete = True

    def verdict(self) -> Verdict:
        """Return which parties, links and groups fail, judged from the outcomes so far.

        A failed pair without a broken party is a link if both parties passed with others, else
        undecided. Of a pair that was tried twice the later outcome counts.
        """
        broken, working = self._broken(), self._working()
        latest = dict(self._tries)
        links: list[Group] = []
        undecided: list[Group] = []
        for pair, outcome in latest.items():
            if not outcome.passed and broken.isdisjoint(pair):
                (links if working.issuperset(pair) else undecided).append(pair)
        return Verdict(
            broken=[party for party in self._parties if party in broken],
            links=list(dict.fromkeys(links + self._links)),
            undecided=undecided + self._undecided,
            num_pairs=len(latest),
            any_pair_passed=bool(working),
            num_together=self._num_together,
            complete=self._complete,
        )

    def last_failure(self, party: Party) -> Outcome:
        """Return the latest failed outcome of a pair with `party`; there must be one."""
        failed = [outcome for pair, outcome in self._tries if party in pair and not outcome.passed]
        return failed[-1]

    def _try_pairs(self, pairs: list[Group]) -> Rounds:
        """Yield one round of pairs, if there are any, and record the outcomes that are sent."""
        if pairs:
            outcomes = yield pairs
            self._tries += zip(pairs, outcomes, strict=True)

    def _working(self) -> set[Party]:
        """Return the parties that passed with at least one partner."""
        return {party for pair, outcome in self._tries if outcome.passed for party in pair}

    def _partners(self, party: Party) -> set[Party]:
        """Return all parties that `party` was tried with."""
        return {other for pair, _ in self._tries if party in pair for other in pair} - {party}

    def _broken(self) -> set[Party]:
        """Return the parties that never passed, and were tried with enough that pass elsewhere.

        Enough is FAILURES_WITH_WORKING, or all others where there are fewer.
        """
        working = self._working()
        enough = min(FAILURES_WITH_WORKING, max(len(self._parties) - 1, 1))
        idle = [party for party in self._parties if party not in working]
        return {party for party in idle if len(self._partners(party) & working) >= enough}

    def _doubtful_pairs(self) -> list[Group]:
        """Return disjoint pairs to try for a decision.

        First each party that is neither broken nor working, with a working one that it was not
        tried with; then failed pairs of working parties again, until a pair was tried
        CONFIRM_ROUNDS + 1 times.
        """
        broken, working = self._broken(), self._working()
        free = [party for party in self._parties if party in working]
        pairs: list[Group] = []
        for party in self._parties:
            if party in broken or party in working:
                continue
            met = self._partners(party)
            helper = next((each for each in free if each not in met), None)
            if helper is not None:
                free.remove(helper)
                pairs.append((party, helper))
        num_tries = Counter(pair for pair, _ in self._tries)
        for pair, outcome in dict(self._tries).items():
            again = not outcome.passed and num_tries[pair] <= CONFIRM_ROUNDS
            if again and set(free).issuperset(pair):
                free = [party for party in free if party not in pair]
                pairs.append(pair)
        return pairs

    def _try_together(self) -> Rounds:
        """Yield rounds that try all parties together; record how many passed, or what fails.

        Left out are broken and undecided parties, and the first of each failed link. If the others
        fail, yields rounds to find the pair or group at fault. A pair is recorded as link, its
        first party is left out, and the rest tried again, MAX_FAULTS_TOGETHER tries at most. A
        group of more than two is recorded as undecided, which ends the search.
        """
        verdict = self.verdict()
        out = set(verdict.broken) | {pair[0] for pair in verdict.links}
        out |= {party for group in verdict.undecided for party in group}
        for _ in range(MAX_FAULTS_TOGETHER):
            rest: Group = tuple(party for party in self._parties if party not in out)
            if len(rest) < 2:
                return
            (outcome,) = yield [rest]
            if outcome.passed:
                self._num_together = len(rest)
                return
            found = yield from _isolate(rest)
            if len(found) != 2:
                self._undecided.append(found)
                return
            self._links.append(found)
            out.add(found[0])


def _halves(group: Group) -> tuple[Group, Group]:
    """Split a group in two; the first half has one party more where the number is odd."""
    middle = (len(group) + 1) // 2
    return group[:middle], group[middle:]


def _isolate(group: Group) -> Generator[list[Group], Sequence[Outcome], Group]:
    """Search a failing group by halves; return the smallest group found that fails.

    It has two parties, or more if they only fail together; if both halves fail, it is in the first.
    Yields the groups of each round, which the caller tries, and is sent their outcomes in order.
    """
    while len(group) > 2:
        left, right = _halves(group)
        parts = [part for part in (left, right) if len(part) > 1]
        outcomes = yield parts
        failing = [p for p, outcome in zip(parts, outcomes, strict=True) if not outcome.passed]
        if not failing:
            return (yield from _isolate_between(left, right))
        group = failing[0]
    return group


def _isolate_between(left: Group, right: Group) -> Generator[list[Group], Sequence[Outcome], Group]:
    """Yield rounds that narrow down a fault between two groups that each pass alone.

    Returns the smallest group that failed: one party of each side, or more parties if no smaller
    group fails.
    """
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
            break
        left, right = failing[0]
    return left + right
