"""A failed write of a checkpoint is an error of the worker, and does not end its process."""

from __future__ import annotations

from pathlib import Path

import pytest
from torch.distributed.checkpoint.api import CheckpointException

from mindspeed_rlxf.engine.sharded_files import raise_os_errors


def test_a_failed_write_names_rank_cause_and_space(tmp_path: Path) -> None:
    failures = {3: (OSError(28, "No space left"), None), 5: (OSError(5, "later"), None)}
    assert not issubclass(CheckpointException, Exception)  # else `raise_os_errors` could go
    said = r"rank 3 of 2 that failed says: OSError: \[Errno 28\]"
    with pytest.raises(OSError, match=said) as e, raise_os_errors(tmp_path):
        raise CheckpointException("write", failures)  # type: ignore[arg-type]
    assert str(tmp_path) in str(e.value) and "MiB are free there" in str(e.value)


def test_errors_other_than_os_errors_are_raised_unchanged(tmp_path: Path) -> None:
    with pytest.raises(KeyError), raise_os_errors(tmp_path):
        raise KeyError("x")
