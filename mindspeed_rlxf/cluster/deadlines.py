"""Deadlines of the driver's waits; `docs/failures.md` shows every number of this module.

| wait                  | deadline                                                      |
|-----------------------|---------------------------------------------------------------|
| devices               | resource_pool.wait_s                                          |
| processes, worlds     | runtime.start_timeout_s                                       |
| a role's build        | runtime.timeout_s                                             |
| save, load of state   | runtime.timeout_s                                             |
| files of checkpoints  | runtime.timeout_s, on each host                               |
| functions that score  | runtime.timeout_s                                             |
| a phase's first call  | runtime.timeout_s                                             |
| its later calls       | the largest of a tenth of it, SHORTEST_S and 5 x the running  |
|                       | median, but no longer than the first                          |
| a collective          | the longer of runtime.timeout_s and runtime.start_timeout_s,  |
|                       | + COLLECTIVE_MARGIN_S, on the workers                         |

A phase is a method of a role on a number of rows, rounded to a power of two. So the deadline of the
first validation does not come from training's generations, which have fewer rows. Free of Ray.

That is on Ray. Without it (`local`) each wait of the ranks for each other has runtime.timeout_s.
"""

from __future__ import annotations

import statistics
from collections import defaultdict, deque
from collections.abc import Sequence

from mindspeed_rlxf.cluster.protocol import BUILD, Request
from mindspeed_rlxf.config.enums import Role

FIRST_CALL_FACTOR = 10.0  # compilation, warm-up of caches and communicators
MEDIAN_FACTOR = 5.0
SHORTEST_S = 30.0  # a busy host can hold up any call for that long
HISTORY = 15  # calls that the median is taken over
# The driver's deadline passes first, so that its message, which names the ranks, is the one seen.
COLLECTIVE_MARGIN_S = 60.0

# Methods that read or write files take as long as the storage needs, whatever came before.
ON_STORAGE = (BUILD, "export", "begin_save", "end_save", "load_state")

Phase = tuple[str, str, int]


class Deadlines:
    """The deadlines of the calls of one run, learnt from the calls that ended."""

    def __init__(self, longest_s: float) -> None:
        """Start without any call. longest_s: `runtime.timeout_s`, the deadline of first calls"""
        self.longest_s = longest_s
        self._seen: dict[Phase, deque[float]] = defaultdict(lambda: deque(maxlen=HISTORY))

    def seconds_for(self, requests: Sequence[Request]) -> float:
        """Return the deadline of a call in seconds, from the median of earlier calls of its phase.

        It is MEDIAN_FACTOR x the median, but at least SHORTEST_S and a tenth of `longest_s`, and
        never more than `longest_s`. `longest_s` itself for the first call of a phase, methods in
        ON_STORAGE and calls of the scorers.
        requests: of all ranks
        """
        phase = phase_of(requests)
        seen = self._seen.get(phase)
        scores = phase[0] == Role.SCORER.value  # late samples fail, each by reward.timeout_s
        if phase[1] in ON_STORAGE or scores or not seen:
            return self.longest_s
        usual = MEDIAN_FACTOR * statistics.median(seen)
        return min(self.longest_s, max(self.longest_s / FIRST_CALL_FACTOR, SHORTEST_S, usual))

    def record(self, requests: Sequence[Request], seconds: float) -> None:
        """Add the seconds of a call without error to the last HISTORY ones of its phase."""
        self._seen[phase_of(requests)].append(seconds)


def phase_of(requests: Sequence[Request]) -> Phase:
    """Return (role, method, bit length of the sum of `num_rows` of the requests that keep rows).

    Role and method are those of the first request; None counts as 0 rows.
    """
    rows = sum(request.num_rows or 0 for request in requests if request.keeps_rows)
    return requests[0].role.value, requests[0].method, rows.bit_length()


def collective_timeout_s(*deadlines: float) -> float:
    """Return the timeout of collectives in seconds: the longest deadline + COLLECTIVE_MARGIN_S.

    deadlines: the driver's, in seconds; they should pass before the collective's
    """
    return max(deadlines) + COLLECTIVE_MARGIN_S
