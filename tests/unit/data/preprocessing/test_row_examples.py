"""Rows become turns by the map keys, or name the reason why not."""

import json
from typing import Any

import pytest

from mindspeed_rlxf.config.problems import UserError
from mindspeed_rlxf.data.handlers import HANDLERS, MapKeys, parse_map_keys
from mindspeed_rlxf.data.preprocessing.examples import UnusableRow, make_example

PPO = HANDLERS["PPOAlpacaStyleInstructionHandler"]
KEYS = MapKeys(prompt="p", query="q", response="r", history="h", system="s")


def turns_of(row: dict[str, Any], keys: MapKeys = KEYS) -> list[tuple[str, str]]:
    return [tuple(turn) for turn in make_example(row, keys, PPO).turns]  # type: ignore[misc]


def message(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        ({"p": "A", "q": "B", "r": "no"}, [("user", "A\nB")]),
        ({"p": "", "q": "B"}, [("user", "B")]),
        ({"p": "A", "q": None, "s": None, "h": None}, [("user", "A")]),
        (
            {"p": "A", "s": "S", "h": [["1", "2"], ["3", "4"]]},
            [("system", "S"), ("user", "1"), ("assistant", "2"), ("user", "3"), ("assistant", "4"),
             ("user", "A")],
        ),
        (
            {"p": [message("user", "1"), message("assistant", "2"), message("user", "3")]},
            [("user", "1"), ("assistant", "2"), ("user", "3")],
        ),
        ({"p": json.dumps([message("user", "1")])}, [("user", "1")]),
        (
            {"p": [message("system", "own"), message("user", "1")], "s": None, "q": "B",
             "h": [["x", "y"]]},
            [("system", "own"), ("user", "x"), ("assistant", "y"), ("user", "1\nB")],
        ),
    ],
)  # fmt: skip
def test_a_row_becomes_turns(row: dict[str, Any], expected: list[tuple[str, str]]) -> None:
    assert turns_of(row) == expected


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ({"q": "B"}, "no prompt"),
        ({"p": " \n", "q": " "}, "empty prompt"),
        ({"p": 7}, "wrong type"),
        ({"p": []}, "wrong type"),
        ({"p": "A", "images": ["x"]}, "images"),
        ({"p": [{"role": "user"}]}, "wrong type"),
        ({"p": [message("user", "A"), message("assistant", "B")]}, "wrong roles"),
        ({"p": [message("tool", "A")]}, "wrong roles"),
        ({"p": [message("user", "A"), message("system", "B")]}, "wrong roles"),
        ({"p": "A", "q": ["B"]}, "wrong type"),
        ({"p": "A", "s": 5}, "wrong type"),
        ({"p": [message("system", "own"), message("user", "1")], "s": "S"}, "two system texts"),
        ({"p": "A", "h": [["B", None]]}, "wrong type"),
        ({"p": "A", "h": [["B", "\udfff"]]}, "invalid unicode"),
    ],
)
def test_a_row_that_makes_no_prompt_has_a_reason(row: dict[str, Any], reason: str) -> None:
    with pytest.raises(UnusableRow) as error:
        make_example(row, KEYS, PPO)
    assert error.value.reason == reason
    assert "; " in str(error.value)  # rule, value; remedy


ALPACA, SHAREGPT = "R1AlpacaStyleInstructionHandler", "R1SharegptStyleInstructionHandler"


@pytest.mark.parametrize(
    ("handler", "text", "problem"),
    [
        (PPO.name, "{prompt: x}", "--map-keys must be a JSON object such as"),
        (PPO.name, '{"promt": "x"}', "did you mean prompt?"),
        (PPO.name, '{"chosen": "x"}', "'chosen' has no use here: pairs are not preprocessed"),
        (PPO.name, '{"query": 3}', "query=3 must be a name"),
        (PPO.name, '{"prompt": ""}', "prompt='' must be a name"),
        (PPO.name, '{"query": "instruction"}', "prompt=null must be a name"),
        (SHAREGPT, '{"system": "conversations"}', "messages=null must be a name"),
        (SHAREGPT, '{"mesages": "x"}', "did you mean messages?"),
        (SHAREGPT, '{"tags": {"user": "x"}}', "did you mean user_tag?"),
        (SHAREGPT, '{"tags": {"user_tag": 1}}', "user_tag=1 must be a name"),
        (SHAREGPT, '{"tags": "user"}', "tags='user' must be an object"),
        (SHAREGPT, '{"tools": "tools"}', "descriptions of tools are not"),
        (SHAREGPT, '{"kto_tag": "k"}', "single judged responses"),
        (SHAREGPT, '{"messages": ""}', "messages='' must be a name"),
        (ALPACA, '{"prompt": "p", "response": "p"}', "both are 'p'"),
    ],
)
def test_wrong_map_keys_are_named(handler: str, text: str, problem: str) -> None:
    with pytest.raises(UserError) as error:
        parse_map_keys(text, HANDLERS[handler])
    assert problem in str(error.value)


def test_defaults_are_kept_unless_another_key_names_their_column() -> None:
    assert parse_map_keys('{"tools": "", "chosen": ""}', PPO) == MapKeys()
    assert parse_map_keys('{"prompt": "input"}', PPO).query is None
    assert parse_map_keys('{"prompt": "question"}', PPO).query == "input"


@pytest.mark.parametrize(("written", "answer"), [(18.0, "18"), (0.5, "0.5"), (" 4.0", " 4.0")])
def test_a_whole_number_is_answered_without_a_fraction(written: Any, answer: str) -> None:
    handler = HANDLERS[ALPACA]
    row = {"instruction": "A", "output": written}
    assert make_example(row, parse_map_keys("{}", handler), handler).answer == answer
