"""Numbers per token are files of whole lines, which a resume cuts to its iteration."""

import json
import math
from pathlib import Path
from typing import Any

from mindspeed_rlxf.reporting.jsonl import cut_token_files, token_files, write_tokens


def lines(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for file in token_files(folder) for line in file.open()]


def write(folder: Path, iterations: range) -> None:
    for iteration in iterations:
        samples = {10 * iteration + i: {"advantage": [1.0, -0.25], "kl": [0.0]} for i in range(2)}
        write_tokens(folder, 3, iteration, samples)


def test_a_line_has_the_sample_and_its_numbers_with_four_digits(tmp_path: Path) -> None:
    numbers = {"advantage": [1 / 3, -2e-9], "value": [math.nan, math.inf]}
    write_tokens(tmp_path / "t", 3, 7, {41: numbers})
    (line,) = lines(tmp_path / "t")
    assert line == {
        "iteration": 7, "sample_id": 41, "advantage": [0.3333, -2e-9], "value": [None, None],
    }  # fmt: skip


def test_a_resume_drops_later_iterations(tmp_path: Path) -> None:
    write(tmp_path, range(1, 6))
    cut_token_files(tmp_path, 3)
    assert [line["iteration"] for line in lines(tmp_path)] == [1, 1, 2, 2, 3, 3]
    write(tmp_path, range(4, 5))
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
