"""Errors that ranks of torchrun send to each other."""

from __future__ import annotations

import pytest

from mindspeed_rlxf.cluster.errors import HostError, WorkerError
from mindspeed_rlxf.cluster.local import _from_text, _to_text


@pytest.mark.parametrize(
    "error",
    [
        WorkerError("actor", 3, "host", "update", "ValueError: \x1b no", "Traceback", True),
        HostError("host", "commit", "OSError: full", "Traceback", is_late=True),
    ],
)
def test_an_error_comes_back_as_it_was(error: WorkerError | HostError) -> None:
    found = _from_text(_to_text(error))
    assert type(found) is type(error) and vars(found) == vars(error) and str(found) == str(error)


def test_no_error_and_an_unknown_kind() -> None:
    assert _from_text(_to_text(None)) is None
    with pytest.raises(KeyError, match="system"):
        _from_text('["system", ["true"]]')
