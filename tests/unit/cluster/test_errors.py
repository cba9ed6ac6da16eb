"""Errors of workers and hosts name role, rank, host, phase and cause."""

from __future__ import annotations

import pickle

import pytest

from mindspeed_rlxf.cluster.errors import HostError, RuntimeTimeout, WorkerError
from mindspeed_rlxf.cluster.local import _decode_failure, _encode_failure


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


def test_a_function_on_a_host_is_named_with_its_cause_on_one_line() -> None:
    error = HostError("b", "commit", "OSError: no\nspace", "trace", True)
    for known in (error, pickle.loads(pickle.dumps(error))):
        assert str(known) == "commit on b failed: OSError: no space"
        assert (known.host, known.phase, known.cause) == ("b", "commit", "OSError: no space")
        assert known.remote_traceback == "trace" and known.is_late


@pytest.mark.parametrize(
    "error",
    [
        WorkerError("actor", 3, "host", "update", "ValueError: \x1b no", "Traceback", True),
        HostError("host", "commit", "OSError: full", "Traceback", is_late=True),
    ],
)
def test_an_error_reaches_other_ranks_of_torchrun_as_it_was(error: WorkerError | HostError) -> None:
    found = _decode_failure(_encode_failure(error))
    assert type(found) is type(error) and vars(found) == vars(error) and str(found) == str(error)


def test_no_error_and_an_unknown_kind() -> None:
    assert _decode_failure(_encode_failure(None)) is None
    with pytest.raises(KeyError, match="system"):
        _decode_failure('["system", ["true"]]')
