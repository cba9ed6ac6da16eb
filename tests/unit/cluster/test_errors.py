"""Errors of workers name role, rank, host, phase and cause."""

from __future__ import annotations

import pickle

from mindspeed_rlxf.cluster.errors import RuntimeTimeout, WorkerError


def test_worker_error_names_role_host_phase_and_cause_and_survives_pickling() -> None:
    error = WorkerError("critic", 3, "host-a", "update_critic", "ValueError: bad", "trace", True)
    for known in (error, pickle.loads(pickle.dumps(error))):
        assert str(known) == ("critic rank 3 on host-a failed in update_critic: ValueError: bad")
        assert (known.role, known.rank, known.host) == ("critic", 3, "host-a")
        assert (known.phase, known.cause) == ("update_critic", "ValueError: bad")
        assert known.remote_traceback == "trace" and known.is_aftermath


def test_timeout_names_the_ranks_that_did_not_arrive() -> None:
    error = pickle.loads(pickle.dumps(RuntimeTimeout("critic.values", 2.5, [1, 3], "why")))
    assert str(error) == "critic.values: ranks 1, 3 did not arrive within 2.5 s; why"
    assert error.missing == [1, 3]
    one = RuntimeTimeout("critic.values", 2.5, [1])
    assert str(one) == "critic.values: rank 1 did not arrive within 2.5 s"
