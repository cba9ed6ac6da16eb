"""The bring-up names the stage that fails, and the first number that differs from the trace."""

import json
import os
from pathlib import Path
from typing import Any

import bring_up
import pytest

STUB = """
import json, os, signal, sys, time
stage = sys.argv[1]
if stage == "patch" and os.environ["STUB"] == "crash":
    print("the last words", flush=True)
    os.kill(os.getpid(), signal.SIGSEGV)
if stage == "patch" and os.environ["STUB"] == "hang" and os.environ["RANK"] == "0":
    print(os.getpid(), flush=True)
    time.sleep(600)
if stage == "patch" and os.environ["STUB"] == "raise":
    raise ValueError("CANN is missing")
print("a line of a log")
print(json.dumps({"stage": len(stage), "world": int(os.environ["WORLD_SIZE"])}))
"""


@pytest.fixture
def stub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Stages that compute next to nothing; the file is their trace."""
    script = tmp_path / "bring_up_stages.py"
    script.write_text(STUB, encoding="utf-8")
    monkeypatch.setattr(bring_up, "HERE", tmp_path)
    monkeypatch.setenv("STUB", "")
    trace = tmp_path / "trace.json"
    worlds = {s.name: s.processes for s in bring_up.STAGES}
    numbers = {name: {"stage": len(name), "world": n} for name, n in worlds.items()}
    trace.write_text(json.dumps(numbers), encoding="utf-8")
    return trace


def run(trace: Path, *more: str) -> int:
    return bring_up.main(["--trace", str(trace), "--stages", "import,patch,collective", *more])


def test_every_stage_that_agrees_is_ok(stub: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(stub) == 0
    lines = capsys.readouterr().out.splitlines()
    stages = ("import", "patch", "collective")
    assert [line.split()[:2] for line in lines] == [[stage, "ok"] for stage in stages]


def test_an_altered_number_fails_its_stage_and_ends_it(
    stub: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    numbers = json.loads(stub.read_text(encoding="utf-8"))
    numbers["patch"]["stage"] = 5.5
    stub.write_text(json.dumps(numbers), encoding="utf-8")
    assert run(stub) == 1
    out = capsys.readouterr().out
    assert "patch         DIFFERS  stage[0] is 5, the trace 5.5: off by 9.1e-02" in out
    assert "collective" not in out


@pytest.mark.parametrize(
    ("failure", "texts"),
    [
        ("crash", ["patch         FAILED  process 0 was ended by SIGSEGV\n    the last words"]),
        ("raise", ["ended with exit code 1", "ValueError: CANN is missing"]),
    ],
)
def test_a_failing_stage_is_shown_with_its_reason(
    stub: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], failure: str,
    texts: list[str],
) -> None:  # fmt: skip
    monkeypatch.setenv("STUB", failure)
    assert run(stub) == 1
    out = capsys.readouterr().out
    assert [text for text in texts if text not in out] == []


def test_a_stage_that_hangs_is_ended_at_its_deadline(
    stub: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STUB", "hang")
    stage = bring_up.Stage("patch", deadline_s=1.5, rtol=0)
    with pytest.raises(bring_up.Failed, match=r"no end after 1\.5 s \(process 0\)") as caught:
        bring_up.run_stage(stage, "cpu", processes=2)
    pid = str(caught.value).split("\n")[-1].strip()
    if pid.isdigit():  # it came as far as to print it
        with pytest.raises(ProcessLookupError):
            os.kill(int(pid), 0)


@pytest.mark.parametrize(
    ("found", "message"),
    [
        ({"a": [1.0, 2.0]}, None),
        ({"a": [1.0, 2.001]}, None),
        ({"a": [1.0, 2.1]}, r"a[1] is 2.1, the trace 2: off by 5.0e-02, allowed 1e-03"),
        ({"a": [float("nan"), 2.0]}, "a[0] is nan"),
        ({"a": [1.0]}, "a has 1 numbers, the trace 2"),
        ({}, "a is missing"),
        ({"a": [1.0, 2.0], "b": 1}, "b is not in the trace"),
    ],
)
def test_differences_are_reported(found: dict[str, Any], message: str | None) -> None:
    lines = list(bring_up.differences({"a": [1.0, 2.0]}, found, 1e-3))
    assert lines == [] if message is None else lines[0].startswith(message)


def test_the_stored_trace_has_every_stage() -> None:
    trace = json.loads(bring_up.TRACE.read_text(encoding="utf-8"))
    names = [stage.name for stage in bring_up.STAGES + bring_up.REAL_STAGES]
    assert list(trace) == names and all(trace[name] for name in names if name != "import")
