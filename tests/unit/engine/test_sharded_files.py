"""A failed write of a checkpoint is an error of the worker, and does not end its process."""

from __future__ import annotations

from pathlib import Path

import pytest
from torch.distributed.checkpoint.api import CheckpointException

from mindspeed_rlxf.engine import sharded_files
from mindspeed_rlxf.engine.sharded_files import raise_os_errors


def test_a_failed_write_names_rank_cause_and_space(tmp_path: Path) -> None:
    failures = {3: (OSError(28, "No space left"), None), 5: (OSError(5, "later"), None)}
    assert not issubclass(CheckpointException, Exception)  # else `raise_os_errors` could go
    said = r"rank 3 of 2 that failed says: OSError: \[Errno 28\]"
    with pytest.raises(OSError, match=said) as e, raise_os_errors(tmp_path):
        raise CheckpointException("write", failures)  # type: ignore[arg-type]
    assert str(tmp_path) in str(e.value) and "MiB are free there" in str(e.value)


def test_a_rank_that_knows_no_cause_points_to_the_first_rank(tmp_path: Path) -> None:
    """Only on the first rank does megatron-core list the failures."""
    with pytest.raises(OSError, match="see the first rank"), raise_os_errors(tmp_path):
        raise CheckpointException("write", {})


def test_a_failed_write_of_an_older_megatron_core_is_an_os_error_too(tmp_path: Path) -> None:
    with pytest.raises(OSError, match=r"No space left.* MiB are free"), raise_os_errors(tmp_path):
        raise RuntimeError("Worker failure") from OSError(28, "No space left")
    with pytest.raises(RuntimeError, match="other"), raise_os_errors(tmp_path):
        raise RuntimeError("other")


def test_the_cause_is_kept_where_the_file_system_is_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def usage(_: Path) -> None:
        raise OSError(116, "Stale file handle")

    monkeypatch.setattr(sharded_files.shutil, "disk_usage", usage)
    text = sharded_files.name_with_free_space(OSError(5, "Input/output error"), tmp_path)
    assert text == "OSError: [Errno 5] Input/output error"


def test_errors_other_than_os_errors_are_raised_unchanged(tmp_path: Path) -> None:
    with pytest.raises(KeyError), raise_os_errors(tmp_path):
        raise KeyError("x")
