"""How many samples may fail before the run stops, and what it says then."""

from types import SimpleNamespace
from typing import Any

import pytest

from mindspeed_rlxf.cluster.group import Pending
from mindspeed_rlxf.cluster.interface import Reply
from mindspeed_rlxf.roles.reports import FailedSample
from mindspeed_rlxf.roles.reward import RewardGroup, RewardsFailed, check_failures


def failures(failed: int, count: int) -> list[FailedSample | None]:
    found = [FailedSample(i, "timeout", "no score within 1 s") for i in range(failed)]
    return [*found, *[None] * (count - failed)]


@pytest.mark.parametrize(
    ("failed", "count", "max_failed", "stops"),
    [
        (1, 64, 0, True),
        (3, 64, 3, False),
        (4, 64, 3, True),
        (6, 64, None, False),  # a tenth of 64 is 6.4
        (7, 64, None, True),
        (1, 4, None, False),  # at least one
        (0, 0, None, False),
    ],
)
def test_the_run_stops_where_more_samples_fail_than_may(
    failed: int, count: int, max_failed: int | None, stops: bool
) -> None:
    if not stops:
        check_failures(failures(failed, count), max_failed)
        return
    with pytest.raises(RewardsFailed) as error:
        check_failures(failures(failed, count), max_failed)
    assert str(error.value).startswith(
        f"{failed} of {count} samples of a batch could not be scored"
    )
    assert "sample 0: timeout (no score within 1 s)" in str(error.value)


class Ended:
    handles = ("rows",)
    waited = 0

    def wait(self) -> list[Reply]:
        self.waited += 1
        return [Reply("report", 1, 0.0)]


def test_scores_of_a_model_wait_for_those_of_the_functions() -> None:
    """A call that nobody waits for would keep the rows that it reads."""
    functions, model = Ended(), Ended()
    group: Any = RewardGroup.__new__(RewardGroup)
    group.streams, group._check = True, lambda _: None
    group._score_by_functions = lambda _: Pending(functions, [0], [1])
    group.scorers, group.group = object(), SimpleNamespace(call=lambda *_: Pending(model, [0], [1]))
    group.score(None).result()
    assert (functions.waited, model.waited) == (1, 1)
