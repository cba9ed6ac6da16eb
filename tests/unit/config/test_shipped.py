"""Every shipped configuration resolves and is what its name says."""

from __future__ import annotations

import pytest

from mindspeed_rlxf.config.compose import builtin_config_dir, compose, config_names
from mindspeed_rlxf.config.enums import CONFIGURED, RewardKind, Role
from mindspeed_rlxf.config.load import resolve
from mindspeed_rlxf.config.schema import RunConfig


def shipped(name: str) -> RunConfig:
    """On a cluster that is joined: its devices are not counted here."""
    return resolve(compose(name, ["device.kind=cpu", "runtime.address=head:6379"]), name)


@pytest.mark.parametrize("name", config_names([builtin_config_dir()]))
def test_shipped_config_is_valid(name: str) -> None:
    assert shipped(name).training.run_name == name


def test_large_counts_fill_whole_hosts() -> None:
    config = shipped("ppo_trainer_llama3_70b")
    assert config.resource_pool["actor_rollout"] == [8] * 32
    assert sum(map(sum, config.resource_pool.values())) == 64 * 8
    assert config.layout(Role.ACTOR_ROLLOUT).dp == 8


def test_tiny_scores_by_rule_on_one_pool_of_two_devices() -> None:
    config = shipped("ppo_trainer_tiny")
    assert config.reward.kind is RewardKind.RULE
    assert config.resource_pool == {"main": [2]}
    assert config.roles_of("main") == list(CONFIGURED)
    assert config.actor_rollout.do_sample


def test_tiny_rm_scores_by_model() -> None:
    config = shipped("ppo_trainer_tiny_rm")
    assert config.reward.kind is RewardKind.MODEL
    assert config.reward.load is not None and config.reward.load.endswith("models/rm")
    assert config.reward.architecture == config.actor_rollout.architecture
