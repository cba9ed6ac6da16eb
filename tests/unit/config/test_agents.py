"""Rules and derived values of `rollout.agent`."""

from typing import Any

import pytest

from mindspeed_rlxf.config.load import resolve
from mindspeed_rlxf.config.problems import ConfigError
from tests.unit.config.test_staleness import SPLIT

AGENT = {"rollout.agent": "mine"}
AT_TURNS = {**AGENT, "algorithm.turn_rewards": True}


@pytest.mark.parametrize(
    ("changes", "keys"),
    [
        (AGENT, []),
        ({**AGENT, **SPLIT}, []),
        ({**AGENT, **SPLIT, "rollout.max_staleness": 1}, []),
        ({**AGENT, "rollout.max_staleness": 1, "rollout.lead": 1}, []),
        ({**AGENT, "rollout.max_staleness": 1}, ["rollout.max_staleness=1"]),
        ({**AGENT, **SPLIT, "rollout.max_staleness": 2}, ["rollout.max_staleness=2"]),
        (
            {**AGENT, "actor_rollout.fixed_responses": "f.jsonl"},
            ["actor_rollout.fixed_responses='f.jsonl'"],
        ),
        ({"algorithm.turn_rewards": True}, ["algorithm.turn_rewards=True"]),
        ({**AGENT, "algorithm.turn_rewards": True}, ["algorithm.turn_rewards=True"]),
        ({**AT_TURNS, "reward.rules": {"a": "agent"}}, []),
        (
            {**AT_TURNS, "reward.rules": {"a": "agent"}, "algorithm.reward_clip": 1.0},
            ["algorithm.turn_rewards=True"],
        ),
    ],
)
def test_no_conversation_may_be_unfinished_where_weights_change(
    make_tree: Any, changes: dict[str, Any], keys: list[str]
) -> None:
    try:
        resolve(make_tree(changes), "test")
        problems = []
    except ConfigError as error:
        problems = [str(problem) for problem in error.problems]
    assert len(problems) == len(keys), problems
    for problem, key in zip(problems, keys, strict=True):
        name, _, value = key.partition("=")
        assert name in problem and value.strip("'").lower() in problem.lower()


def test_slices_are_shorter_with_agents(make_tree: Any) -> None:
    for changes, steps in (({}, 256), (AGENT, 32), ({**AGENT, "rollout.slice_steps": 8}, 8)):
        assert resolve(make_tree(changes), "test").rollout.slice_steps == steps


@pytest.mark.parametrize(
    ("agent", "column", "expected"),
    [
        (None, "other", ""),
        ("mine", None, "mine"),
        ("mine", "other", "other"),
        ("by_row", "other", "other"),
        ("by_row", None, ""),
    ],
)
def test_a_row_chooses_its_agent(
    make_tree: Any, agent: str | None, column: str | None, expected: str
) -> None:
    config = resolve(make_tree({"rollout.agent": agent} if agent else {}), "test")
    columns = {"agent_name": column} if column else {}
    assert config.rollout.agent_of(columns) == expected
