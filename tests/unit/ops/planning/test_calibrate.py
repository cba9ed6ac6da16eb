"""A measurement that fails ends with a message."""

from __future__ import annotations

from pathlib import Path

import pytest

from mindspeed_rlxf.config.errors import UserError
from mindspeed_rlxf.ops.planning import calibrate


def test_a_training_that_does_not_end_is_given_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(calibrate, "COMMAND", "import time; time.sleep(30)")
    monkeypatch.setattr(calibrate, "LIMIT_S", 0.5)
    with pytest.raises(UserError, match=r"a short training did not end in 0\.5 s"):
        calibrate._run_training(tmp_path, "")


def test_a_training_that_fails_is_told_with_its_last_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(calibrate, "COMMAND", "import sys; sys.exit('no such device')")
    with pytest.raises(UserError, match="ended with 1: no such device"):
        calibrate._run_training(tmp_path, "")
