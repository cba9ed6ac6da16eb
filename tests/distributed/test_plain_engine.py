"""Roles compute the same losses on Megatron and on an engine of plain torch."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.testing import assert_close

from mindspeed_rlxf.algorithms.slots import value_mask
from mindspeed_rlxf.cluster.group import Sharded
from mindspeed_rlxf.config.enums import Role
from mindspeed_rlxf.config.schema import OptimizerConfig
from mindspeed_rlxf.data.batch import Experience, RoleOutput, Rollouts
from mindspeed_rlxf.roles.actor import ActorRole
from mindspeed_rlxf.roles.critic import CriticRole
from mindspeed_rlxf.roles.reports import UpdateReport
from tests.distributed.groups import build_group
from tests.distributed.llamas import PLAIN, make_llama, run_config
from tests.distributed.samples import make_experience, make_rollouts
from tests.plain_engine import PlainEngine

STEPS = [[0, 1, 2, 3], [4, 5, 6, 7], [7, 2, 5, 0]]
ADAM = OptimizerConfig(lr=1e-3, clip_grad=0.5)


class Reporting(CriticRole):
    def report(self, rollouts: Rollouts) -> RoleOutput:
        """Report values as numbers, which a driver gets in no other way."""
        rows: Any = self.values(rollouts).rows
        return RoleOutput(report=rows.values.tolist())


class ReportingActor(ActorRole):
    def report(self, rollouts: Rollouts) -> RoleOutput:
        rows: Any = self.log_probs(rollouts).rows
        return RoleOutput(report=rows.log_probs.tolist())


def with_gaps(rollouts: Rollouts, experience: Experience) -> tuple[Rollouts, Experience]:
    """In responses of five and more tokens, the second, third and last were given."""
    trained = rollouts.trained_mask.clone()
    for row, length in enumerate(rollouts.response_lengths.tolist()):
        if length >= 5:
            trained[row, [1, 2, length - 1]] = False
    slots = value_mask(trained, rollouts.response_mask, rollouts.has_eos, "after_eos", 99)
    return replace(rollouts, trained_mask=trained), replace(
        experience, trained_mask=trained, value_mask=slots
    )


@pytest.fixture(params=["every token", "gaps"])
def samples(request: pytest.FixtureRequest) -> tuple[Rollouts, Experience]:
    rollouts = make_rollouts()
    made = rollouts, make_experience(rollouts)
    return made if request.param == "every token" else with_gaps(*made)


def close(ours: UpdateReport, theirs: UpdateReport) -> None:
    for mine, others in zip(ours.steps, theirs.steps, strict=True):
        assert mine.keys() == others.keys()
        assert mine == pytest.approx(others, rel=2e-4, abs=1e-6)


def test_actor_and_critic_learn_the_same_over_both_engines(warm_runtime, tmp_path, samples):
    rollouts, experience = samples
    make_llama(tmp_path / "lm", PLAIN)
    make_llama(tmp_path / "scored", PLAIN, scored=True, seed=1)
    folders, keys = (tmp_path / "lm", tmp_path / "scored"), {"micro_batch_size": 2}
    sampled = {"do_sample": True, "temperature": 0.8}
    config = run_config(*folders, PLAIN, keys, 1, ADAM, actor_rollout=sampled)
    layout = config.layout(Role.CRITIC)
    actor = build_group(warm_runtime, layout, ReportingActor, config)
    critic = build_group(warm_runtime, layout, Reporting, config, role=Role.CRITIC)
    rows = Sharded([rollouts]), Sharded([experience]), Sharded([STEPS])
    plain_actor = ReportingActor(config, PlainEngine)
    plain_critic = Reporting(config, PlainEngine)

    for group, role in ((actor, plain_actor), (critic, plain_critic)):
        (ours,) = group.call(type(role).report, rows[0]).result()
        theirs = role.report(rollouts).report
        assert_close(torch.tensor(ours), torch.tensor(theirs), rtol=1e-4, atol=1e-5)
    (ours,) = actor.call(ActorRole.update_policy, *rows, 0.0).result()
    close(ours, plain_actor.update_policy(rollouts, experience, STEPS).report)
    (ours,) = critic.call(CriticRole.update_critic, *rows).result()
    close(ours, plain_critic.update_critic(rollouts, experience, STEPS).report)
