"""The calculator of the language model: what it continues, what it rewards, and its questions."""

import asyncio
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from mindspeed_rlxf.agents.session import AGENTS
from mindspeed_rlxf.config.plugins import complete_plugin
from tests.registries import restored_registries
from tests.unit.agents.said_session import SaidSession

FILE = Path(__file__).resolve().parents[3] / "examples" / "smollm2" / "word_problems.py"


@pytest.mark.parametrize(
    ("texts", "results", "score"),
    [
        (("calc: 34 * 12 =", "calc: 408 - 58 =", "There are 350 pens left."), (408, 350), 1.0),
        (("calc: 34 * 12 =", "calc: 408 - 58 =", "There are 351 pens left."), (408, 350), 0.0),
        (("There are 34 * 12 =", " 350 pens left."), (), 1.0),
        (("calc: 34 * 12 =", "calc: 408 + 350"), (408,), 0.0),
    ],
)
def test_a_call_is_continued_by_its_result(
    texts: tuple[str, ...], results: tuple[int, ...], score: float
) -> None:
    session = SaidSession(*texts)
    session.ground_truth = "350"
    with restored_registries():
        complete_plugin("training.plugins", str(FILE))
        asyncio.run(AGENTS["calculator"]().run(session))
    given = [{"role": "assistant", "content": f" {result}\n"} for result in results]
    assert session.messages == given and session.score == score


@pytest.fixture
def make_data(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    monkeypatch.syspath_prepend(str(FILE.parent))
    with restored_registries():
        import make_data

        yield make_data
    for name in ("make_data", "word_problems"):
        sys.modules.pop(name)


@pytest.mark.parametrize("data_source", ["calculator", "three_calls"])
def test_questions_have_answers_and_no_pair_of_factors_twice(
    make_data: Any, data_source: str
) -> None:
    problems = make_data.word_problems
    train, test = problems.make_split(1, data_source)
    pairs = []
    for rows in (train, test):
        numbers = [
            list(map(int, problems.NUMBER.findall(row["prompt"][-1]["content"]))) for row in rows
        ]
        truths = [int(row["ground_truth"]) for row in rows]
        for truth, (left, right, first, *second) in zip(truths, numbers, strict=True):
            if data_source == "three_calls":
                assert truth == left * right + first - second[0]
            else:
                assert truth in (left * right + first, left * right - first)
        pairs.append({(left, right) for left, right, *_ in numbers})
    assert len(train) == problems.NUM_TRAIN and len(test) == problems.NUM_TEST
    assert not pairs[0] & pairs[1]


def test_files_have_a_row_per_line(make_data: Any, tmp_path: Path) -> None:
    make_data.main(["--output", str(tmp_path / "new")])
    splits = {
        "": make_data.word_sums.make_split(1),
        "three_calls_": make_data.word_problems.make_split(1, "three_calls"),
    }
    for prefix, split in splits.items():
        files = [tmp_path / "new" / f"{prefix}{name}.jsonl" for name in ("train", "test")]
        rows = tuple([json.loads(line) for line in file.read_text().splitlines()] for file in files)
        assert rows == split
