"""An iteration starts all its calls before it waits for any."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from mindspeed_rlxf.cluster.refs import RankRows, RowsRef
from mindspeed_rlxf.config.enums import OldLogProbs
from mindspeed_rlxf.config.schema import AlgorithmConfig, RolloutConfig
from mindspeed_rlxf.data.sampler import PromptSampler
from mindspeed_rlxf.trainer.ppo import PpoTrainer
from mindspeed_rlxf.trainer.prompt_source import PromptSource
from mindspeed_rlxf.trainer.stopping import StopRequest
from tests.virtual_roles import make_prompts


class Waited(Exception):
    """The driver asked for a result."""


class Call:
    def __init__(self, name: str) -> None:
        self.name, self.producers = name, list[str]()

    def after(self, other: Call) -> Call:
        self.producers.append(other.name)
        return self

    def with_earlier(self) -> list[Call]:
        return [self]

    def rows(self) -> RowsRef:
        return RowsRef((RankRows("somewhere", 4),))

    def result(self) -> Any:
        raise Waited


class Scripted:
    """A role whose methods note that they were called."""

    server_has_failed = False

    def __init__(self, role: str, called: list[str]) -> None:
        self._role, self._called = role, called
        self._calls: list[Call] = []

    def __getattr__(self, method: str) -> Any:
        def call(*_arguments: Any, **_named: Any) -> Call:
            self._calls.append(Call(f"{self._role}.{method}"))
            self._called.append(self._calls[-1].name)
            return self._calls[-1]

        return call


@pytest.mark.parametrize("limit", ["max_new_tokens", "batch_width"])
def test_all_roles_have_work_before_the_driver_waits(limit):
    called: list[str] = []
    config: Any = SimpleNamespace(
        algorithm=AlgorithmConfig(score_slot_limit=limit),
        actor_rollout=SimpleNamespace(n_samples_per_prompt=1, max_new_tokens=8),
        training=SimpleNamespace(train_iters=1, seed=1, global_batch_size=1),
        rollout=RolloutConfig(),
        runs_vllm=False,
        lead=0,
        train_rollout_split=(),
        validation=SimpleNamespace(before=False),
        warmup_iters=0,
        critic_iters=1,
        old_log_probs=OldLogProbs.RECOMPUTE,
        count_updates=lambda iteration: iteration,
    )
    names = ("actor", "rollout", "ref", "critic", "reward")
    roles: Any = SimpleNamespace(**{name: Scripted(name, called) for name in names})
    prompts = PromptSource(make_prompts(1), PromptSampler(1, 1, 1, False), 1)
    checkpoints: Any = SimpleNamespace()
    nobody: Any = None
    recorder: Any = SimpleNamespace(token_log=lambda *_: None)
    with pytest.raises(Waited):
        PpoTrainer(config, roles, prompts, nobody, recorder, checkpoints, StopRequest(0.0)).fit()
    scoring = ["rollout.update_weights", "rollout.add", "rollout.advance", "rollout.take"]
    scoring += ["reward.score", "rollout.forget"]
    scoring += ["actor.log_probs", "ref.log_probs", "critic.values"]
    updates = ["critic.make_experience", "critic.update_critic", "actor.update_policy"]
    # TRL's limit is the length of the longest response, which has to be known first
    by_width = limit == "batch_width"
    assert called == scoring + ([] if by_width else updates)
    if not by_width:  # the deadline of experience does not count the time of what it is made of
        experience = roles.critic._calls[1]
        assert experience.producers == ["actor.log_probs", "ref.log_probs", "critic.values"]
