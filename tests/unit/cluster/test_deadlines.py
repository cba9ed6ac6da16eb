"""The deadline of a call follows from the time of earlier calls of its kind."""

from __future__ import annotations

import pytest

from mindspeed_rlxf.cluster.deadlines import ON_STORAGE, Deadlines, collective_timeout_s
from mindspeed_rlxf.cluster.protocol import Request
from mindspeed_rlxf.config.enums import Role
from mindspeed_rlxf.engine.protocol import TrainEngine


def call(method: str, rows: int | None = 8, role: Role = Role.CRITIC) -> list[Request]:
    """Of a leader and of a rank that is none, whose rows do not count."""
    return [
        Request(role, method, (), True, rows),
        Request(role, method, (), False, rows),
    ]


def test_a_first_call_has_ten_times_the_floor_and_later_ones_five_medians() -> None:
    deadlines = Deadlines(longest_s=600.0)
    assert deadlines.seconds_for(call("values")) == 600.0
    for seconds in (2.0, 100.0, 20.0):
        deadlines.record(call("values"), seconds)
    assert deadlines.seconds_for(call("values")) == 100.0  # 5 x 20, the median
    deadlines.record(call("update_critic"), 1.0)
    assert deadlines.seconds_for(call("update_critic")) == 60.0  # the floor
    deadlines.record(call("generate"), 400.0)
    assert deadlines.seconds_for(call("generate")) == 600.0  # collectives would end first beyond it


def test_no_later_call_has_less_than_half_a_minute_unless_the_first_had() -> None:
    for longest, later in ((120.0, 30.0), (20.0, 20.0)):
        deadlines = Deadlines(longest_s=longest)
        deadlines.record(call("values"), 0.1)
        assert deadlines.seconds_for(call("values")) == later


def test_the_median_is_of_the_last_calls() -> None:
    deadlines = Deadlines(longest_s=600.0)
    for seconds in [100.0] * 20 + [30.0] * 8:  # the last 15: 7 x 100, 8 x 30
        deadlines.record(call("values"), seconds)
    assert deadlines.seconds_for(call("values")) == 150.0


OF_FILES = ["build", "export", "begin_save", "end_save", "load_state"]


@pytest.mark.parametrize("method", OF_FILES)
def test_calls_that_wait_for_storage_always_have_the_longest_deadline(method: str) -> None:
    deadlines = Deadlines(longest_s=600.0)
    deadlines.record(call(method), 1.0)
    assert deadlines.seconds_for(call(method)) == 600.0


def test_the_names_of_calls_that_wait_for_storage_are_methods_of_engines() -> None:
    assert sorted(ON_STORAGE) == sorted(OF_FILES)
    assert [name for name in OF_FILES if not hasattr(TrainEngine, name)] == ["build"]


def test_samples_that_time_out_end_before_the_wait_for_their_scorers() -> None:
    """Scores are there when they are asked for, until a function or a server hangs."""
    deadlines = Deadlines(longest_s=600.0)
    deadlines.record(call("score", role=Role.SCORER), 0.1)
    assert deadlines.seconds_for(call("score", role=Role.SCORER)) == 600.0


def test_another_role_method_or_size_has_a_deadline_of_its_own() -> None:
    deadlines = Deadlines(longest_s=600.0)
    deadlines.record(call("values", rows=8), 1.0)
    assert deadlines.seconds_for(call("values", rows=15)) == 60.0
    for other in (
        call("values", rows=16),
        call("values", rows=None),
        call("scores"),
        call("values", role=Role.REWARD),
    ):
        assert deadlines.seconds_for(other) == 600.0


def test_collectives_wait_longer_than_the_driver() -> None:
    assert collective_timeout_s(30.0, 90.0) == 150.0
