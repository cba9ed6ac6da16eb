"""A failed write of a checkpoint is an error of the worker, and does not end its process."""

from pathlib import Path

import pytest
from torch.distributed.checkpoint.api import CheckpointException

from mindspeed_rlxf.engine.collective_errors import raise_os_errors


def test_a_failed_write_names_rank_and_cause(tmp_path: Path) -> None:
    failures = {3: (OSError(28, "No space left"), None), 5: (OSError(5, "later"), None)}
    assert not issubclass(CheckpointException, Exception)  # else `raise_os_errors` could go
    said = r"rank 3: OSError: \[Errno 28\]"
    with pytest.raises(OSError, match=said) as e, raise_os_errors(tmp_path):
        raise CheckpointException("write", failures)  # type: ignore[arg-type]
    assert str(tmp_path) in str(e.value)

    # only on the first rank does megatron-core list the failures
    with pytest.raises(OSError, match="see the first rank"), raise_os_errors(tmp_path):
        raise CheckpointException("write", {})


def test_a_failed_write_of_an_older_megatron_core_is_an_os_error_too(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="No space left"), raise_os_errors(tmp_path):
        raise RuntimeError("Worker failure") from OSError(28, "No space left")
    with pytest.raises(RuntimeError, match="other"), raise_os_errors(tmp_path):
        raise RuntimeError("other")
