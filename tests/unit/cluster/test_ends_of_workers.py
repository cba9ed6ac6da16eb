"""Messages of Ray about a lost worker become one line of ours."""

from __future__ import annotations

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

    from mindspeed_rlxf.cluster.ray.wait import as_worker_error

    origin = Origin("critic", 3, "b", "values", "/logs/rank_00003.log")
    error = as_worker_error(RayActorError(error_msg=said), origin)
    assert error.cause.startswith("the process died") and reason in error.cause
    assert error.cause.endswith("its last output is in /logs/rank_00003.log")
    assert said in error.remote_traceback
