"""Numbers per token are bounded files of whole lines, which a resume cuts to its iteration."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from mindspeed_rlxf.reporting.sample_tokens import TokenWriter, cut_token_files, token_files


def lines(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for file in token_files(folder) for line in file.lines()]


def write(folder: Path, iterations: range, limit: int = 0) -> None:
    for iteration in iterations:
        samples = {10 * iteration + i: {"advantage": [1.0, -0.25], "kl": [0.0]} for i in range(2)}
        TokenWriter(folder, 3, limit).write(iteration, samples)


def test_a_line_has_the_sample_and_its_numbers_with_four_digits(tmp_path: Path) -> None:
    numbers = {"advantage": [1 / 3, -2e-9], "value": [math.nan, math.inf]}
    TokenWriter(tmp_path / "t", 3).write(7, {41: numbers})
    (line,) = lines(tmp_path / "t")
    assert line == {
        "iteration": 7, "sample_id": 41, "advantage": [0.3333, -2e-9], "value": [None, None],
    }  # fmt: skip
    file = tmp_path / "t" / "rank_00003.jsonl"
    assert file.stat().st_mode & 0o777 == 0o600 and file.parent.stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize("limit", [0, 100])
def test_a_resume_drops_later_iterations_in_parts_too(tmp_path: Path, limit: int) -> None:
    write(tmp_path, range(1, 6), limit)
    assert len(list(tmp_path.glob("*.gz"))) == (5 if limit else 0)
    cut_token_files(tmp_path, 3)
    assert [line["iteration"] for line in lines(tmp_path)] == [1, 1, 2, 2, 3, 3]
    write(tmp_path, range(4, 5), limit)
    assert [line["iteration"] for line in lines(tmp_path)] == [1, 1, 2, 2, 3, 3, 4, 4]
    cut_token_files(tmp_path, 0)
    assert lines(tmp_path) == []


def test_a_killed_writer_loses_one_line(tmp_path: Path) -> None:
    write(tmp_path, range(1, 3))
    file = tmp_path / "rank_00003.jsonl"
    file.write_bytes(file.read_bytes()[:-9])
    write(tmp_path, range(3, 4))
    found = file.read_bytes().splitlines()
    assert len(found) == 6 and json.loads(found[-1])["sample_id"] == 31
    cut_token_files(tmp_path, 1)
    assert [line["sample_id"] for line in lines(tmp_path)] == [10, 11]


def test_a_damaged_part_does_not_keep_a_run_from_resuming(tmp_path: Path) -> None:
    write(tmp_path, range(1, 3), 100)
    (part, *_) = tmp_path.glob("*.gz")
    part.write_bytes(part.read_bytes()[:-12])
    cut_token_files(tmp_path, 1)
    write(tmp_path, range(3, 4), 100)
