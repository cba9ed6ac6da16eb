"""The section `offload` of a role: layers, refusals, and what a resumed run may change."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from mindspeed_rlxf.checkpoint.directory import find_changes
from mindspeed_rlxf.config.enums import Role
from mindspeed_rlxf.config.keys import to_tree
from mindspeed_rlxf.config.load import resolve, resolve_with_notes

MakeTree = Callable[..., dict[str, Any]]
Problems = Callable[..., list[str]]
REWARD_MODEL = {"reward.kind": "model", "placement.reward": "main"}


def test_layers_merge_key_by_key(make_tree: MakeTree) -> None:
    changes = {
        **REWARD_MODEL,
        "model.small.offload": {"weights": True},
        "training.offload": {"optimizer": True},
        "critic.offload": {"weights": False},
    }
    config = resolve(make_tree(changes), "test")
    found = {role: tuple(config.role(role).offload.model_dump().values()) for role in config.roles}
    assert found == {
        Role.ACTOR_ROLLOUT: (True, True),
        Role.CRITIC: (False, True),
        Role.REF: (True, False),
        Role.REWARD: (True, False),
    }


def test_nothing_is_offloaded_by_default(make_tree: MakeTree) -> None:
    offload = resolve(make_tree(), "test").actor_rollout.offload
    assert (offload.weights, offload.optimizer) == (False, False)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        (
            {"ref.offload": {"optimizer": True}},
            "ref.offload.optimizer=true must be false in a role that learns nothing; remove it",
        ),
        (
            {**REWARD_MODEL, "reward.offload.optimizer": True},
            "reward.offload.optimizer=true must be false in a role that learns nothing; remove it",
        ),
        (
            {"training.offload": True},
            "training.offload=true must be a section of keys; write `key: value` lines",
        ),
        (
            {"training.offload.weight": True},
            "training.offload.weight: unknown key; did you mean training.offload.weights?",
        ),
        (
            {"model.small.offload.weights": "some"},
            "model.small.offload.weights='some' must be true or false",
        ),
        (
            {"actor_rollout_ref.actor_rollout.offload.optimizer": 1},
            "actor_rollout_ref.actor_rollout.offload.optimizer=1 must be true or false",
        ),
        (
            {"training.swap_optimizer": True},
            "training.swap_optimizer=true is not supported: nothing is moved to the host",
        ),
    ],
)
def test_offload_keys_that_cannot_work_are_refused(
    problems: Problems, changes: dict[str, Any], expected: str
) -> None:
    (found,) = problems(changes)
    assert found.startswith(expected.split(" ")[0])


def test_a_resumed_run_may_change_offload_weights(make_tree: MakeTree) -> None:
    before = to_tree(resolve(make_tree(), "test"))
    now = to_tree(resolve(make_tree({"training.offload": {"weights": True}}), "test"))
    changes = find_changes(before, now)
    assert {(change.key, change.rule) for change in changes} == {
        (f"{role}.offload.weights", "free") for role in ("actor_rollout", "ref", "critic")
    }
    assert resolve(now, "test") == resolve(make_tree({"training.offload.weights": True}), "test")


def test_a_run_from_before_the_key_resumes_with_its_default(make_tree: MakeTree) -> None:
    before = to_tree(resolve(make_tree(), "test"))
    now = to_tree(resolve(make_tree(), "test"))
    del before["critic"]["offload"]
    assert find_changes(before, now) == []


def test_a_rule_as_reward_has_nothing_to_offload(make_tree: MakeTree) -> None:
    tree = make_tree({"reward.offload.weights": True})
    assert "reward.offload" in "".join(resolve_with_notes(tree, "test")[1])
