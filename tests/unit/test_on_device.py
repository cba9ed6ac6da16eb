"""Every stage for a device runs on a CPU too, and a stage that fails does not end the others."""

import json
import os
import signal
import subprocess
import sys
import time
from argparse import Namespace
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.processes import ROOT, read_lines, run_python

sys.path.append(str(ROOT / "benchmarks"))

import on_device
import update
from device_stages import STAGES
from device_stages.settings import QUICK, Settings, Stage
from device_stages.table import Row, table
from device_stages.trace import Span, summarize

# Their code is that of the stages which run.
OF_ANOTHER_SIZE = {"update-0.5b-megatron", "update-0.5b-fsdp", "decode-0.5b", "grpo-1.5b"}


def test_every_stage_prints_its_line_without_ray(tmp_path: Path) -> None:
    assert {stage.name for stage in STAGES} >= OF_ANOTHER_SIZE
    stages = [stage for stage in STAGES if stage.name not in OF_ANOTHER_SIZE]
    without_ray = tmp_path / "ray"
    without_ray.mkdir()
    (without_ray / "__init__.py").write_text("raise ImportError('no Ray here')", encoding="utf-8")
    run_python(
        "-W", "ignore", "benchmarks/on_device.py", "--quick", "--threads", "1", "--minutes", "60",
        "--stages", ",".join(stage.name for stage in stages), "--output", tmp_path / "out",
        PYTHONPATH=os.pathsep.join([str(ROOT), str(tmp_path)]), OMP_NUM_THREADS="1",
    )  # fmt: skip
    lines = {line["stage"]: line for line in read_lines(tmp_path / "out" / "results.jsonl")}
    assert list(lines) == [stage.name for stage in stages]
    skipped = {name for name, line in lines.items() if "skipped" in line}
    assert skipped == {"bring-up-real", "grpo-0.5b-trl", "vllm-1.5b"}
    for engine in ("megatron", "fsdp"):
        updated = lines[f"update-1.5b-{engine}"]
        assert updated["tokens"] == 4 * (8 + 24) and updated["update_tflops"] > 0
    assert lines["resume"]["is_equal"] and lines["resume"]["killed_in"] == 2
    assert lines["graphs-1.5b"]["equal_tokens"] == 1 and lines["graphs-1.5b"]["off_by"] < 0.01
    assert len(lines["trace-1.5b"]["kernels"]) == 10
    text = table(list(lines.values()), stages)
    assert [name for name in lines if name not in text and name != "environment"] == []


def make_settings(folder: Path) -> Settings:
    return Settings("cpu", QUICK, 1, folder, folder, None, None, "fork")


def fails(_settings: Settings) -> dict[str, Any]:
    raise ValueError("out of\nmemory")


def dies(_settings: Settings) -> dict[str, Any]:
    os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError("unreachable")


def hangs(settings: Settings) -> dict[str, Any]:
    process = subprocess.Popen(["sleep", "600"])
    (settings.folder / "pid").write_text(str(process.pid), encoding="utf-8")
    os.write(1, b"waiting\n")  # as print does, but past pytest
    process.wait()
    return {}


def works(_settings: Settings) -> dict[str, Any]:
    return {"figure": 7}


def make_row(line: Any) -> Row:
    return Row(line["stage"], str(line["figure"]))


def test_a_stage_that_fails_hangs_or_dies_does_not_end_the_next(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    stages = [
        Stage("fails", 60, fails, make_row),
        Stage("dies", 60, dies, make_row),
        Stage("hangs", 2.5, hangs, make_row),
        Stage("works", 60, works, make_row),
        Stage("long", 1e6, works, make_row),
    ]
    assert on_device.run_all(stages, make_settings(tmp_path), time.monotonic() + 1000) == 1
    printed = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert printed == read_lines(tmp_path / "results.jsonl")
    lines = {line["stage"]: line for line in printed}
    assert lines["fails"]["error"] == "ValueError: out of memory"
    assert lines["dies"]["error"].startswith("exit code -9")
    assert "waiting" in lines["hangs"]["error"]
    assert lines["works"]["figure"] == 7 and "error" not in lines["works"]
    assert lines["long"] == {"stage": "long", "skipped": "out of time"}
    pid = int((tmp_path / "pid").read_text(encoding="utf-8"))
    assert not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    assert "| works | 7 |" in table(printed, stages)


def test_the_update_is_measured_without_trl(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    commands = []
    monkeypatch.setattr(subprocess, "Popen", lambda words, **_: commands.append(words))
    update.Served("fsdp", tmp_path, Namespace(trl=None))
    assert commands[0][-3:] == ["--serves", "fsdp", str(tmp_path)]


def test_gaps_are_between_the_last_end_and_the_next_start() -> None:
    """b runs beside a and ends at 150: gaps from 150 to 300 and from 310 to 700, not to 720."""
    spans = [
        Span("a", 0, 100), Span("b", 50, 150), Span("c", 90, 95), Span("a", 300, 310),
        Span("d", 700, 710), Span("e", 720, 721),
    ]  # fmt: skip
    figures = summarize(spans)
    assert figures["gaps"] == 2 and figures["gaps_ms"] == pytest.approx(0.540)
    assert figures["longest_gaps"][0] == {"us": 390.0, "after": "a", "before": "d"}
    assert figures["window_ms"] == pytest.approx(0.721)
    assert figures["kernels"][0] == {"name": "a", "calls": 2, "ms": 0.11}
