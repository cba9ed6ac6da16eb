"""The section `offload` of a role: layers, refusals, and what a resumed run may change."""

import pytest

from mindspeed_rlxf.checkpoint.directory import find_changes
from mindspeed_rlxf.config.enums import Role
from mindspeed_rlxf.config.keys import to_tree
from mindspeed_rlxf.config.load import resolve

REWARD_MODEL = {"reward.kind": "model", "placement.reward": "main"}


def test_layers_merge_key_by_key(make_tree):
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


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"ref.offload": {"optimizer": True}}, "ref.offload.optimizer=true"),
        ({**REWARD_MODEL, "reward.offload.optimizer": True}, "reward.offload.optimizer=true"),
        ({"training.offload": True}, "training.offload=true"),
        ({"actor_rollout_ref.actor_rollout.offload.optimizer": 1},
         "actor_rollout_ref.actor_rollout.offload.optimizer=1"),
        ({"training.swap_optimizer": True}, "training.swap_optimizer=true"),
    ],
)  # fmt: skip
def test_offload_keys_that_cannot_work_are_refused(problems, changes, expected):
    (found,) = problems(changes)
    assert found.startswith(expected)


def test_a_resumed_run_may_change_offload_weights(make_tree):
    before = to_tree(resolve(make_tree(), "test"))
    now = to_tree(resolve(make_tree({"training.offload": {"weights": True}}), "test"))
    changes = find_changes(before, now)
    assert {(change.key, change.rule) for change in changes} == {
        (f"{role}.offload.weights", "free") for role in ("actor_rollout", "ref", "critic")
    }
    assert resolve(now, "test") == resolve(make_tree({"training.offload.weights": True}), "test")
