"""The demo's report."""

import json
from pathlib import Path
from typing import Any

import pytest
import report


def sample(iteration: int, sample_id: int, response: str, score: float) -> dict[str, Any]:
    texts = {"prompt": f"1{sample_id}+10=", "response": response, "ground_truth": f"2{sample_id}"}
    return {"iteration": iteration, "sample_id": sample_id, "score": score, **texts}


def test_the_curve_has_one_bar_per_validation() -> None:
    accuracy, score = "val/arithmetic/pass@1", "critic/score/mean"
    metrics = [{accuracy: 0.5}, {score: 0.25}, {accuracy: 1.0, score: 0.75}]
    lines = report.curve([{"iteration": i, "metrics": found} for i, found in enumerate(metrics)])
    bars = [line for line in lines if "|" in line]
    assert [line.count("#") for line in bars] == [25, 50]
    assert "50.0%" in bars[0]
    assert len({len(line) for line in bars}) == 1
    assert "0.250 at first, 0.750 at last" in lines[-1]


def test_samples_of_first_and_last_validation_stand_side_by_side() -> None:
    samples = [sample(0, i, "99", 0.0) for i in range(5)]
    samples += [sample(10, i, "98", 0.0) for i in range(5)]
    samples += [sample(20, i, f"2{i}" if i == 4 else "97", float(i == 4)) for i in range(5)]
    lines = report.before_and_after(samples)
    assert len(lines) == 6
    # 14+10= is the one that PPO put right, so it comes first.
    assert lines[1].split() == ["14+10=", "99", "24", "24"]
    assert lines[2].split() == ["10+10=", "99", "97", "20"]


def test_a_question_in_a_chat_template_is_shown_without_it() -> None:
    chat = (
        "<|im_start|>system\nAdd.<|im_end|>\n<|im_start|>user\nHow many are 10 and 11?<|im_end|>\n"
    )
    samples = [sample(0, 0, "10 and\n11", 0.0), sample(9, 0, "10 + 11 = 21", 1.0)]
    lines = report.before_and_after([{**one, "prompt": chat} for one in samples])
    assert "\n".join(lines).split("\n") == [
        "How many are 10 and 11?", "  before  10 and 11", "  after   10 + 11 = 21", "  truth   20",
    ]  # fmt: skip


def test_a_run_is_reported(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    metrics = {"iteration": 0, "metrics": {"val/arithmetic/pass@1": 0.5}, "time_s": 1.0}
    (tmp_path / "metrics.jsonl").write_text(json.dumps(metrics) + "\n", encoding="utf-8")
    text = json.dumps(sample(0, 1, "21", 1.0)) + "\n"
    (tmp_path / "val_samples.jsonl").write_text(text, encoding="utf-8")
    monkeypatch.setattr("sys.argv", ["report.py", str(tmp_path)])
    assert report.main() == 0
    out = capsys.readouterr().out
    assert "50.0%" in out and str(tmp_path) in out
    (tmp_path / "metrics.jsonl").unlink()
    assert report.main() == 2
    assert capsys.readouterr().err.startswith("error: ")
