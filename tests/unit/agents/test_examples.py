"""The agents and the tool of the examples, and the rows that the tiny policy learns from."""

import asyncio
import sys
from pathlib import Path
from typing import Any

import pytest

from mindspeed_rlxf.agents.session import AGENTS
from mindspeed_rlxf.config.plugins import complete_plugin, complete_tool
from tests.registries import restored_registries
from tests.unit.agents.said_session import SaidSession

FOLDER = Path(__file__).resolve().parents[3] / "examples" / "agent"


def lead(file: str, name: str, *texts: str) -> SaidSession:
    session = SaidSession(*texts)
    with restored_registries():
        complete_plugin("training.plugins", str(FOLDER / file))
        asyncio.run(AGENTS[name]().run(session))
    return session


def test_the_calculator_answers_a_call_and_nothing_else() -> None:
    session = lead("calculator.py", "calculator", "12+35?", "47", "not said")
    assert [message["content"] for message in session.messages] == ["47>"]
    assert session.texts == ["not said"]
    assert lead("calculator.py", "calculator", "47", "not said").messages == []
    assert lead("calculator.py", "calculator", "12+?", "not said").messages == []
    shuffled = lead("calculator.py", "shuffled_calculator", "12+35?", "47").messages
    assert shuffled[0]["content"].endswith(">") and shuffled[0]["content"] != "47>"


def test_the_guesser_hints_until_a_guess_is_right() -> None:
    session = lead("guess.py", "guess", "3", "7", "4", "not said")
    hints = [message["content"] for message in session.messages]
    assert hints == ["It is larger.", "It is smaller."] and session.score == 0.8


def test_the_search_takes_its_folder_from_the_row(tmp_path: Path) -> None:
    tool = complete_tool("rollout.tools", f"{FOLDER / 'search.py'}:search")
    (tmp_path / "a.txt").write_text("red apples\ngreen pears\nred pears\n", encoding="utf-8")
    namespace: dict[str, Any] = {}
    exec(Path(tool["function"].rpartition(":")[0]).read_text(encoding="utf-8"), namespace)
    assert namespace["search"]("red", folder=str(tmp_path)) == ["red apples", "red pears"]


def test_a_row_of_a_call_does_not_teach_the_result(monkeypatch: pytest.MonkeyPatch) -> None:
    for folder in (FOLDER, FOLDER.parent / "tiny"):
        monkeypatch.syspath_prepend(str(folder))
    import make_policy as made

    ids, targets = made.call_row(made.Problem(57, 38), "120")
    text = "".join(made.ALL_TOKENS[i] for i in ids)
    assert text.replace("<pad>", "") == "57+38=57+38?120>120<eos>"
    taught = "".join(made.ALL_TOKENS[i] for i in targets)
    assert taught.replace("<pad>", "_").strip("_") == "57+38=57+38?____120<eos>"
    for name in ("make_policy", "tiny_task", "train_models"):
        sys.modules.pop(name)
