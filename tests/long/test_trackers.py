"""swanlab and trackio, offline: the metrics of a run can be read back from their files.

No set of constraints/ has them; the tests are skipped where they are not installed:
`pip install -c constraints/extras/trackers.txt swanlab trackio` in an environment of its own.
TensorBoard and wandb are in the sets: `tests/unit/reporting/test_tracker_packages.py`.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.tracker_records import check_resumed_run


@pytest.mark.long
@pytest.mark.parametrize("name", ["swanlab", "trackio"])
def test_a_resumed_run_continues_its_record_offline(name: str, tmp_path: Path) -> None:
    pytest.importorskip(name, reason="pip install -c constraints/extras/trackers.txt " + name)
    check_resumed_run(name, tmp_path)
