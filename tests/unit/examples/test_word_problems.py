"""The calculator of the language model: what it continues, what it rewards, and its questions."""

import asyncio
from pathlib import Path

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


def test_questions_have_answers_and_no_pair_of_factors_twice(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.syspath_prepend(str(FILE.parent))
    with restored_registries():
        import word_problems

    train, test = word_problems.make_split(1)
    pairs = []
    for rows in (train, test):
        numbers = [
            list(map(int, word_problems.NUMBER.findall(row["prompt"][-1]["content"])))
            for row in rows
        ]
        truths = [int(row["ground_truth"]) for row in rows]
        assert all(
            truth in (left * right + other, left * right - other)
            for truth, (left, right, other) in zip(truths, numbers, strict=True)
        )
        pairs.append({(left, right) for left, right, _ in numbers})
    assert len(train) == word_problems.NUM_TRAIN and len(test) == word_problems.NUM_TEST
    assert not pairs[0] & pairs[1]
