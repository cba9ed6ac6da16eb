"""swanlab, offline: the metrics of a run can be read back from its files.

No set of constraints/ has it; the test is skipped if it is not installed:
`pip install -c constraints/extras/trackers.txt swanlab` in an environment of its own.
TensorBoard and wandb are in the sets: `tests/unit/reporting/test_trackers.py`.
"""

from pathlib import Path

import pytest

from tests.tracker_records import check_resumed_run


@pytest.mark.long
def test_a_resumed_run_continues_its_record_offline(tmp_path: Path) -> None:
    pytest.importorskip("swanlab", reason="pip install -c constraints/extras/trackers.txt swanlab")
    check_resumed_run("swanlab", tmp_path)
