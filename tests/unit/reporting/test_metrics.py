"""Metric and sample files: valid JSON lines, readable while the run goes on."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from mindspeed_rlxf.reporting.jsonl import JsonlWriter, Sample, metrics_record, read_metrics

SAMPLE = Sample(
    sample_id=7,
    prompt="1+1=",
    response="2",
    prompt_ids=[3, 4],
    response_ids=[5, 2],
    score=1.0,
    reward_parts={"accuracy": 1.0},
    weights_version=(3, 4),
)


def lines(file: Path) -> list[dict]:
    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is not JSON")

    text = file.read_text(encoding="utf-8")
    assert text == "" or text.endswith("\n")
    return [json.loads(line, parse_constant=refuse) for line in text.splitlines()]


def test_an_iteration_is_one_line_at_once(tmp_path):
    """Read before the writer is closed."""
    file = tmp_path / "metrics.jsonl"
    writer = JsonlWriter(file)
    writer.write(metrics_record(1, {"critic/kl": 0.5, "actor/lr": 1}, 2.5))
    assert lines(file) == [
        {"iteration": 1, "metrics": {"critic/kl": 0.5, "actor/lr": 1.0}, "time_s": 2.5}
    ]
    writer.write(metrics_record(2, {"critic/kl": 0.25}, 3))
    assert [line["iteration"] for line in lines(file)] == [1, 2]
    writer.close()


@pytest.mark.parametrize(
    ("given", "written"),
    [
        (np.float32(0.5), 0.5),
        (np.int64(3), 3.0),
        (float("nan"), None),
        (float("inf"), None),
        (float("-inf"), None),
    ],
)
def test_numbers_are_numbers_of_json_and_others_are_null(given, written, tmp_path):
    JsonlWriter(tmp_path / "metrics.jsonl").write(metrics_record(1, {"a": given}, np.float64(1.5)))
    assert lines(tmp_path / "metrics.jsonl") == [
        {"iteration": 1, "metrics": {"a": written}, "time_s": 1.5}
    ]


FIELDS = {
    "iteration": 3,
    "sample_id": 7,
    "prompt": "1+1=",
    "response": "2",
    "prompt_ids": [3, 4],
    "response_ids": [5, 2],
    "score": 1.0,
    "reward_parts": {"accuracy": 1.0},
    "weights_version": [3, 4],
}


@pytest.mark.parametrize(
    ("changes", "written"),
    [
        ({}, {}),
        ({"ground_truth": ""}, {"ground_truth": ""}),
        (
            {"score": float("nan"), "reward_parts": {"a": float("inf")}},
            {"score": None, "reward_parts": {"a": None}},
        ),
    ],
)
def test_a_sample_has_the_fields_of_the_contract(changes, written, tmp_path):
    JsonlWriter(tmp_path / "samples.jsonl").write(replace(SAMPLE, **changes).record(3))
    assert lines(tmp_path / "samples.jsonl") == [{**FIELDS, **written}]


def test_text_is_utf8_and_one_line(tmp_path):
    """Line ends inside a text, characters beyond ASCII, and a half character."""
    text = "größe 数学\r\n\u2028\ud800"
    JsonlWriter(tmp_path / "samples.jsonl").write(replace(SAMPLE, response=text).record(1))
    raw = (tmp_path / "samples.jsonl").read_bytes()
    assert raw.count(b"\n") == 1
    assert "größe 数学".encode() in raw
    assert json.loads(raw)["response"] == text


def test_lines_that_a_kill_cut_are_skipped(tmp_path):
    file = tmp_path / "metrics.jsonl"
    JsonlWriter(file).write(metrics_record(1, {"a": float("nan")}, 1.0))
    file.open("a").write('{"iteration": 2, "metr')
    assert list(read_metrics(file)) == [(1, {"a": None})]


def test_a_metric_of_an_older_run_has_its_present_name(tmp_path):
    file = tmp_path / "metrics.jsonl"
    file.write_text('{"iteration": 1, "metrics": {"response_length/cut_fraction": 0.5}}\n')
    assert list(read_metrics(file)) == [(1, {"response_length/truncated_fraction": 0.5})]
