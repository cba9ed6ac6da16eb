"""Find stretches of a run whose iterations take much longer than earlier ones."""

from __future__ import annotations

import bisect
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from mindspeed_rlxf.reporting.health_rules import LAG_SHARE
from mindspeed_rlxf.reporting.report.curves import curve_of
from mindspeed_rlxf.reporting.report.records import Iteration

SLOW = 1.5  # times the median of all iterations before
WINDOW = 10  # iterations of the median that is compared with it
TIME = "timing/all"


@dataclass(frozen=True)
class Stretch:
    """Slow iterations, `first` to `last` (None = to the end); before, now: median seconds."""

    first: int
    last: int | None
    before: float
    now: float

    @property
    def text(self) -> str:
        when = f"from iteration {self.first} on" if self.last is None else (
            f"in iterations {self.first} to {self.last}")  # fmt: skip
        return (
            f"iterations take {self.now:.3g} s {when}, {self.now / self.before:.1f} times the "
            f"{self.before:.3g} s before (medians)"
        )


def find_slow_stretches(iterations: Sequence[Iteration]) -> list[Stretch]:
    """Return stretches in which the median of 10 iterations is over 1.5 times the level before.

    The level is the median of all iterations before the first such 10.
    """
    curve = [point for point in curve_of(iterations, TIME) if point[0] > 0]
    values = [value for _, value in curve]
    found: list[Stretch] = []
    begin, before = -1, 0.0
    ordered = sorted(values[: WINDOW - 1])  # those before the window
    for end in range(2 * WINDOW, len(curve) + 1):
        start = end - WINDOW
        bisect.insort(ordered, values[start - 1])
        limit = SLOW * (before if begin >= 0 else ordered[start // 2])
        slow = [i for i in range(start, end) if values[i] > limit]
        if statistics.median(values[start:end]) > limit:
            if begin < 0:
                begin, before = slow[0], limit / SLOW
        elif begin >= 0:
            last = max([i for i in range(begin, end) if values[i] > limit])
            now = statistics.median(values[begin : last + 1])
            found.append(Stretch(curve[begin][0], curve[last][0], before, now))
            begin = -1
    if begin >= 0:
        now = statistics.median(values[begin:])
        found.append(Stretch(curve[begin][0], None, before, now))
    return found


def explain(iterations: Sequence[Iteration], stretch: Stretch) -> str:
    """Return a text: the long phases that became over SLOW times slower, and an advice."""
    before = [i for i in iterations if 0 < i.number < stretch.first]
    last = stretch.last if stretch.last is not None else iterations[-1].number
    during = [i for i in iterations if stretch.first <= i.number <= last]
    ratios = dict(_compare_phases(before, during))
    slower = {name: ratio for name, ratio in ratios.items() if ratio > SLOW}
    if slower and len(slower) == len(ratios):
        return (
            "all long phases became slower together: look for other load on the hosts, their "
            "clocks and their temperatures"
        )
    named = ", ".join(f"{name} {ratio:.1f} times" for name, ratio in slower.items())
    start = f"slower phases: {named}; " if named else ""
    return start + "compare response_length/, memory/ and skew/ with this time"


def _compare_phases(
    before: Sequence[Iteration], during: Sequence[Iteration]
) -> Iterator[tuple[str, float]]:
    """Yield (phase, its median in `during` over that in `before`) of each long phase."""
    names = sorted({n for i in during for n in i.metrics if n.startswith("timing/")} - {TIME})
    whole = statistics.median(v for _, v in curve_of(during, TIME))
    for name in (n for n in names if n not in ("timing/val", "timing/save")):
        old, new = ([v for _, v in curve_of(part, name)] for part in (before, during))
        if not old or not new or statistics.median(new) < LAG_SHARE * whole:
            continue
        if then := statistics.median(old):
            yield name.removeprefix("timing/"), statistics.median(new) / then
