"""verl's keys of several turns become an agent with tools, its turns and its results."""

import json
from pathlib import Path
from typing import Any

import pytest

from mindspeed_rlxf.agents import tools as _tools  # noqa: F401  registers verl's agents
from mindspeed_rlxf.agents.session import AGENTS
from mindspeed_rlxf.compat.verl.files import read_verl
from mindspeed_rlxf.compat.verl.table import ROLLOUT
from mindspeed_rlxf.compat.verl.translate import translate_verl
from mindspeed_rlxf.config.raw_config import RawConfig

TURNS = f"{ROLLOUT}.multi_turn"


@pytest.fixture
def translate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return a function from options in verl's grammar to what they become."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(json.dumps({"model_type": "qwen3"}))
    (tmp_path / "base.yaml").write_text("dry_run: true\n")

    def run(*options: str) -> RawConfig:
        usual = (
            "actor_rollout_ref.model.path=model", "critic.model.path=model",
            "data.train_files=train.parquet", "data.val_files=test.parquet",
            f"{ROLLOUT}.name=vllm", "data.max_response_length=300",
        )  # fmt: skip
        return translate_verl(read_verl(tmp_path / "base.yaml", (*usual, *options)), lambda _: 7473)

    return run


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ((), {}),
        ((f"{TURNS}.max_assistant_turns=5",), {}),
        (
            (f"{TURNS}.enable=true",),
            {"agent": "tool_agent", "max_turns": 300, "max_tool_response_length": 256},
        ),
        (
            (
                f"{TURNS}.enable=true",
                f"{TURNS}.max_assistant_turns=5",
                f"{TURNS}.max_tool_response_length=99",
                f"{TURNS}.tool_response_truncate_side=middle",
                "rollout.tools=[python]",
            ),
            {
                "agent": "tool_agent",
                "max_turns": 5,
                "max_tool_response_length": 99,
                "tools": ["python"],
            },
        ),
    ],
)
def test_several_turns_are_an_agents(translate: Any, options: Any, expected: Any) -> None:
    raw = translate(*options)
    names = ("agent", "max_turns", "max_tool_response_length", "tools")
    rollout = raw.sections["rollout"]
    assert {name: rollout[name] for name in names if name in rollout} == expected
    assert raw.problems == []


def test_classes_of_tools_are_refused_and_verls_agents_exist(translate: Any) -> None:
    for key in (f"{TURNS}.tool_config_path", f"{ROLLOUT}.agent.agent_loop_config_path"):
        problems = translate(f"{TURNS}.enable=true", f"{key}=tools.yaml").problems
        assert [problem.key for problem in problems] == [key]
    assert {"tool_agent", "single_turn_agent"} <= AGENTS.keys()
