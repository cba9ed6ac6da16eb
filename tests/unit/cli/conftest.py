"""Fixtures that tests of one command share."""

from pathlib import Path

import pytest

from mindspeed_rlxf.cli import command_line


@pytest.fixture
def preprocess_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Restore after the test the variables that `preprocess` sets; work in `tmp_path`.

    Progress lines are switched off.
    """
    monkeypatch.setenv("TOKENIZERS_PARALLELISM", "false")
    monkeypatch.setenv("TORCH_DEVICE_BACKEND_AUTOLOAD", "0")
    monkeypatch.setattr(command_line, "LINE_S", 1e9)
    monkeypatch.chdir(tmp_path)
