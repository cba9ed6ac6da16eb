"""Files of metrics, samples and tokens are JSON lines, which a reader or a resume can use."""

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mindspeed_rlxf.reporting.jsonl import (
    JsonlWriter,
    Sample,
    cut_token_files,
    metrics_record,
    read_metrics,
    token_files,
    write_tokens,
)

SAMPLE = Sample(7, "1+1=", "2", [3, 4], [5, 2], 1.0, {"accuracy": 1.0}, (3, 4))


def lines(file: Path) -> list[dict[str, Any]]:
    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is not JSON")

    text = file.read_text(encoding="utf-8")
    assert text.endswith("\n")
    return [json.loads(line, parse_constant=refuse) for line in text.splitlines()]


def test_an_iteration_is_one_line_at_once(tmp_path):
    writer = JsonlWriter(file := tmp_path / "metrics.jsonl")
    writer.write(metrics_record(1, {"critic/kl": 0.5, "actor/lr": 1}, 2.5))
    first = {"iteration": 1, "metrics": {"critic/kl": 0.5, "actor/lr": 1.0}, "time_s": 2.5}
    assert lines(file) == [first]
    writer.write(metrics_record(2, {"critic/kl": 0.25}, 3))
    assert [line["iteration"] for line in lines(file)] == [1, 2]
    writer.close()


@pytest.mark.parametrize(
    ("given", "written"),
    [(np.float32(0.5), 0.5), (np.int64(3), 3.0), (math.nan, None), (-math.inf, None)],
)
def test_numbers_are_numbers_of_json_and_others_are_null(given, written, tmp_path):
    JsonlWriter(tmp_path / "metrics.jsonl").write(metrics_record(1, {"a": given}, np.float64(1.5)))
    (line,) = lines(tmp_path / "metrics.jsonl")
    assert line == {"iteration": 1, "metrics": {"a": written}, "time_s": 1.5}


@pytest.mark.parametrize(("changes", "written"), [
    ({}, {}), ({"ground_truth": ""}, {"ground_truth": ""}),
    (
        {"score": math.nan, "reward_parts": {"a": math.inf}},
        {"score": None, "reward_parts": {"a": None}},
    ),
])  # fmt: skip
def test_a_sample_has_the_fields_of_the_contract(changes, written, tmp_path):
    JsonlWriter(tmp_path / "samples.jsonl").write(replace(SAMPLE, **changes).record(3))
    fields = {
        "iteration": 3, "sample_id": 7, "prompt": "1+1=", "response": "2", "prompt_ids": [3, 4],
        "response_ids": [5, 2], "score": 1.0, "reward_parts": {"accuracy": 1.0},
        "weights_version": [3, 4],
    }  # fmt: skip
    assert lines(tmp_path / "samples.jsonl") == [{**fields, **written}]


def test_text_is_utf8_and_one_line(tmp_path):
    text = "größe 数学\r\n\u2028\ud800"
    JsonlWriter(tmp_path / "samples.jsonl").write(replace(SAMPLE, response=text).record(1))
    raw = (tmp_path / "samples.jsonl").read_bytes()
    assert raw.count(b"\n") == 1 and "größe 数学".encode() in raw
    assert json.loads(raw)["response"] == text


def test_lines_that_a_kill_cut_are_skipped_and_older_names_are_renamed(tmp_path):
    file = tmp_path / "metrics.jsonl"
    older = {"response_length/cut_fraction": 0.5, "a": math.nan}
    JsonlWriter(file).write(metrics_record(1, older, 1.0))
    file.open("a").write('{"iteration": 2, "metr')
    assert list(read_metrics(file)) == [(1, {"response_length/truncated_fraction": 0.5, "a": None})]


def token_lines(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for file in token_files(folder) for line in file.open()]


def write(folder: Path, iterations: range) -> None:
    for iteration in iterations:
        samples = {10 * iteration + i: {"advantage": [1.0, -0.25], "kl": [0.0]} for i in range(2)}
        write_tokens(folder, 3, iteration, samples)


def test_tokens_have_numbers_of_four_digits(tmp_path):
    numbers = {"advantage": [1 / 3, -2e-9], "value": [math.nan, math.inf]}
    write_tokens(tmp_path / "t", 3, 7, {41: numbers})
    (line,) = token_lines(tmp_path / "t")
    assert line == {
        "iteration": 7, "sample_id": 41, "advantage": [0.3333, -2e-9], "value": [None, None],
    }  # fmt: skip


def test_a_resume_drops_the_tokens_of_later_iterations(tmp_path):
    write(tmp_path, range(1, 6))
    cut_token_files(tmp_path, 3)
    write(tmp_path, range(4, 5))
    assert [line["iteration"] for line in token_lines(tmp_path)] == [1, 1, 2, 2, 3, 3, 4, 4]
    cut_token_files(tmp_path, 0)
    assert token_lines(tmp_path) == []


def test_a_killed_writer_loses_one_line_of_tokens(tmp_path):
    write(tmp_path, range(1, 3))
    file = tmp_path / "rank_00003.jsonl"
    file.write_bytes(file.read_bytes()[:-9])
    write(tmp_path, range(3, 4))
    found = file.read_bytes().splitlines()
    assert len(found) == 6 and json.loads(found[-1])["sample_id"] == 31
    cut_token_files(tmp_path, 1)
    assert [line["sample_id"] for line in token_lines(tmp_path)] == [10, 11]
