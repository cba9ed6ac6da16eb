"""The classes of verl's tutorial: roles, pools and rewards become keys, or one line of error."""

from pathlib import Path

import pytest
import ray
from omegaconf import OmegaConf

from mindspeed_rlxf import api
from mindspeed_rlxf.api import (
    ActorRolloutRefWorker,
    CriticWorker,
    RayPPOTrainer,
    ResourcePoolManager,
    RewardManager,
    RewardModelWorker,
    Role,
)
from mindspeed_rlxf.config import enums
from mindspeed_rlxf.config.problems import ConfigError
from mindspeed_rlxf.reporting.jsonl import Sample
from mindspeed_rlxf.roles.reference import ReferenceRole

ROOT = Path(__file__).parents[2]
START = "tests/golden/start"
ACTOR, REF = Role.ActorRollout, Role.RefPolicy
PPO = {ACTOR: ActorRolloutRefWorker, Role.Critic: CriticWorker, REF: ActorRolloutRefWorker}


class OwnCritic(CriticWorker):
    pass


class OwnReward(RewardModelWorker):
    pass


def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    return float(solution_str == ground_truth)


@pytest.fixture
def make(monkeypatch):
    """Return a trainer of examples/library/ppo.yaml with these workers and pools."""
    monkeypatch.chdir(ROOT)
    monkeypatch.setenv("RAY_ADDRESS", "local")

    def run(workers=PPO, pools=None, places=None, config=None, **more):
        tree = OmegaConf.load("examples/library/ppo.yaml")
        paths = (("actor_rollout_ref.model.path", START), ("critic.model.path", START))
        steps = (("trainer.n_gpus_per_node", 1), ("trainer.total_training_steps", 4))
        for key, value in (*paths, *steps, *(config or {}).items()):
            OmegaConf.update(tree, key, value)
        pools = pools or {"global_pool": [1]}
        manager = ResourcePoolManager(pools, places or dict.fromkeys(workers, next(iter(pools))))
        return RayPPOTrainer(tree, None, workers, manager, **more)

    return run


def test_roles_and_pools_of_a_script_are_those_of_the_run(make):
    found = make({**PPO, Role.Critic: OwnCritic}, {"池": [1], "own": [1]}, {ACTOR: "池", REF: "池",
                 Role.Critic: "own"})  # fmt: skip
    assert found.config.resource_pool == {"池": [1], "own": [1]}
    assert found.config.placement[enums.Role.CRITIC] == "own"
    assert found.classes[enums.Role.CRITIC] is OwnCritic
    assert found.classes[enums.Role.REF] is ReferenceRole


def test_a_class_may_be_rays_as_in_verls_script(make):
    found = make({**PPO, Role.Critic: ray.remote(OwnCritic)})
    assert found.classes[enums.Role.CRITIC] is OwnCritic


def test_actor_and_rollout_on_two_pools_split_one(make):
    workers = {Role.Actor: ActorRolloutRefWorker, Role.Rollout: ActorRolloutRefWorker,
               REF: ActorRolloutRefWorker, Role.Critic: CriticWorker}  # fmt: skip
    places = {Role.Actor: "a", Role.Rollout: "b", REF: "c", Role.Critic: "c"}
    config = make(workers, {"a": [1], "b": [1], "c": [1]}, places).config
    assert (config.parts, config.resource_pool) == ((1, 1), {"c": [1], "a+b": [2]})


def test_a_reward_class_of_ones_own_replaces_the_rule(make):
    found = make({**PPO, Role.RewardModel: OwnReward})
    assert found.config.reward.kind is enums.RewardKind.ROLE
    assert found.classes[enums.Role.REWARD] is OwnReward


def test_a_function_of_a_file_scores(make):
    rewards = RewardManager(None, 0, compute_score)
    (part,) = make(reward_fn=rewards).config.reward.parts
    assert part.function == f"{__file__}:compute_score"


CASES = {
    "has it again": ({**PPO, Role.ActorRolloutRef: ActorRolloutRefWorker}, {}),
    "must have a worker for rollout; use": ({Role.Actor: ActorRolloutRefWorker}, {}),
    "must have a worker for critic": ({ACTOR: ActorRolloutRefWorker, REF: ReferenceRole}, {}),
    "must have a subclass of CriticRole": ({**PPO, Role.Critic: OwnReward}, {}),
    "must name a pool of resource_pool_spec": (PPO, {"places": {ACTOR: "global_pool"}}),
    "must hold a role": (PPO, {"pools": {"global_pool": [1], "idle": [2]}}),
    "ray_worker_group_cls must be RayWorkerGroup": (
        PPO, {"config": {"actor_rollout_ref.actor.strategy": "fsdp", "critic.strategy": "fsdp"},
              "ray_worker_group_cls": api.NVMegatronRayWorkerGroup},
    ),
    "compute_score=<lambda> must be a function": (
        PPO, {"reward_fn": RewardManager(None, 0, lambda **_: 0.0)},
    ),
    "val_reward_fn must have": (PPO, {"val_reward_fn": RewardManager(None, 0, compute_score)}),
}  # fmt: skip


@pytest.mark.parametrize("said", CASES)
def test_a_wrong_combination_is_one_line(make, said):
    workers, more = CASES[said]
    with pytest.raises(ConfigError) as caught:
        make(workers, **more)
    (problem,) = caught.value.problems
    assert said in str(problem)


def test_a_call_prints_the_first_samples_of_each_data_source(capsys):
    def sample(number: int, source: str) -> Sample:
        return Sample(number, f"p{number}", "r", [], [], float(number), {}, (0, 0), source)

    samples = [sample(1, "a"), sample(2, "a"), sample(3, "b")]
    assert RewardManager(None, 1)(samples) == [1.0, 2.0, 3.0]
    printed = capsys.readouterr().out
    assert "[prompt] p1" in printed and "[prompt] p3" in printed and "p2" not in printed


def test_ours_and_verls_yaml_are_told_apart(make):
    config = make().config
    mine = {"training": {"run_name": "x"}, "actor_rollout": {"load": START}}
    assert api._read(mine).sections["training"] == {"run_name": "x"}
    assert api._read(config).sections["training"]["run_name"] == "library_ppo"
