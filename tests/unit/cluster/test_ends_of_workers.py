"""Messages of Ray about a lost worker become one line of ours."""

from unittest.mock import Mock

import pytest

from mindspeed_rlxf.cluster.errors import Origin


@pytest.mark.parametrize(
    ("said", "reason"),
    [
        ("The actor died because its node has died. Node Id: 12", "Ray on its host ended"),
        ("Worker exits because the raylet died", "Ray on its host ended"),
        ("Task was killed due to the node running low on memory.", "its host ran out of memory"),
        ("connection error code 2. End of file. ray stop --force", "killed, crashed or out of"),
    ],
)
def test_a_lost_worker_is_reported_with_its_reason(said: str, reason: str) -> None:
    from ray.exceptions import RayActorError

    from mindspeed_rlxf.cluster.ray.pool import RankCall, as_worker_error

    origin = Origin("critic", 3, "b", "values", "/logs/rank_00003.log")
    error = as_worker_error(RayActorError(error_msg=said), RankCall(origin, "reply"))
    assert error.cause.startswith("the process died") and reason in error.cause
    assert error.cause.endswith("its last output is in /logs/rank_00003.log")
    assert said in error.remote_traceback


def test_lost_rows_and_a_dead_producer_are_named_by_the_call_that_made_the_rows() -> None:
    from ray.exceptions import ObjectLostError, RayActorError, RayTaskError

    from mindspeed_rlxf.cluster.ray.pool import RankCall, as_worker_error

    makers = [RankCall(Origin("ref", i, "b", "log_probs"), Mock(), Mock()) for i in range(2)]
    for number, maker in enumerate(makers):
        maker.rows.hex.return_value = f"rows {number}"
        maker.reply.task_id().actor_id().hex.return_value = f"actor {number}"
    reader = RankCall(Origin("critic", 3, "c", "values"), "reply", Mock(), makers)
    for lost, cause in (
        (ObjectLostError("rows 1", b"", ""), "its result was lost (ObjectLostError)"),
        (RayActorError("actor 1", "gone"), "the process died (killed"),
    ):
        for error in (lost, RayTaskError("values", "", lost)):
            found = as_worker_error(error, reader)
            assert (found.role, found.rank, found.host, found.phase) == ("ref", 1, "b", "log_probs")
            assert found.cause.startswith(cause)
