"""Calls that the driver waits for are recorded once, with waits that matter and no large pools."""

import time

import pytest

from mindspeed_rlxf.cluster.group import record_call, take_spans
from mindspeed_rlxf.cluster.interface import Reply
from mindspeed_rlxf.reporting.timeline import Span


@pytest.fixture(autouse=True)
def _nothing_of_others() -> None:
    take_spans()


def reply(rank: int) -> Reply:
    return Reply(None, None, 2.0, rank, 100.0)


def test_a_call_is_work_of_its_ranks_and_the_wait_of_the_driver() -> None:
    asked = time.time() - 5.0
    record_call("main", ["critic.values"] * 2, [reply(0), reply(1)], asked)
    first, second, driver = take_spans()
    assert first == Span("critic.values", "main", 0, 100.0, 2.0)
    assert second == Span("critic.values", "main", 1, 100.0, 2.0)
    assert (driver.name, driver.pool, driver.kind) == ("wait for critic.values", "driver", "wait")
    assert driver.seconds == pytest.approx(5.0, abs=1.0)
    assert take_spans() == [], "they are taken once"


def test_ranks_that_are_not_drawn_and_short_waits_are_left_out() -> None:
    replies = [reply(rank) for rank in range(500)]
    asked = time.time() + 60  # a busy host may take more than 1 ms to get to the end of the call
    record_call("main", ["ref.log_probs"] * 500, replies, asked)
    assert len(take_spans()) == 64
