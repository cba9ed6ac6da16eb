"""What tests report where the simulated device cannot be built."""

from pathlib import Path

import pytest

from tests.npu_sim import build
from tests.npu_sim.conftest import require


def test_what_is_missing_skips_here_and_fails_in_ci() -> None:
    with pytest.raises(pytest.skip.Exception, match="no compiler"):
        require("no compiler", {})
    with pytest.raises(pytest.fail.Exception, match="no compiler"):
        require("no compiler", {"CI": "true"})
    require("", {"CI": "true"})


def test_a_source_with_a_fault_is_reported_by_the_compilers_words(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    if build.missing():
        pytest.skip(build.missing())
    (tmp_path / "device.cpp").write_text("int one = two;")
    monkeypatch.setattr(build, "SOURCES", tmp_path)
    monkeypatch.setenv(build.CACHE, str(tmp_path / "cache"))
    with pytest.raises(RuntimeError, match=r"does not build: .*two"):
        build.library()
