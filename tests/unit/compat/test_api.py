"""The classes of verl's tutorial: roles, pools and rewards become keys, or one line of error."""

import json
from enum import Enum
from functools import partial
from pathlib import Path

import pytest
import ray
from omegaconf import OmegaConf
from torch.utils.data import SequentialSampler
from transformers import AutoTokenizer

from mindspeed_rlxf import api
from mindspeed_rlxf.api import (
    ActorRolloutRefWorker,
    CriticWorker,
    RayPPOTrainer,
    ResourcePoolManager,
    RewardManager,
    RewardModelWorker,
    RLHFDataset,
    Role,
)
from mindspeed_rlxf.compat.verl import library
from mindspeed_rlxf.config import enums
from mindspeed_rlxf.config.plugins import complete_function, find_carried
from mindspeed_rlxf.config.problems import ConfigError
from mindspeed_rlxf.config.reward_section import STRUCTURED, FunctionConfig
from mindspeed_rlxf.reporting.jsonl import Sample
from mindspeed_rlxf.rewards.outcome import Sample as reward_inputs
from mindspeed_rlxf.rewards.scoring import Plan, SampleScorer
from mindspeed_rlxf.roles.reference import ReferenceRole
from tests.unit.compat import verl_script

ROOT = Path(__file__).parents[3]
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

    def run(workers=PPO, pools=None, places=None, config=None, tokenizer=None, **more):
        tree = OmegaConf.load("examples/library/ppo.yaml")
        paths = (("actor_rollout_ref.model.path", START), ("critic.model.path", START))
        steps = (("trainer.n_gpus_per_node", 1), ("trainer.total_training_steps", 4))
        for key, value in (*paths, *steps, *(config or {}).items()):
            OmegaConf.update(tree, key.removeprefix("+"), value, force_add=key.startswith("+"))
        pools = pools or {"global_pool": [1]}
        manager = ResourcePoolManager(pools, places or dict.fromkeys(workers, next(iter(pools))))
        return RayPPOTrainer(tree, tokenizer, workers, manager, **more)

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
    assert (config.train_rollout_split, config.resource_pool) == ((1, 1), {"c": [1], "a+b": [2]})


def test_a_reward_class_of_ones_own_replaces_the_rule(make):
    found = make({**PPO, Role.RewardModel: OwnReward})
    assert found.config.reward.kind is enums.RewardKind.ROLE
    assert found.classes[enums.Role.REWARD] is OwnReward


def test_a_function_of_a_file_scores(make):
    rewards = RewardManager(None, 0, compute_score)
    (part,) = make(reward_fn=rewards).config.reward.scoring_functions
    assert part.function == f"{__file__}:compute_score"


def score_by(manager, response, truth, source, **extra_info):
    """Score as a scoring process does, which makes the manager again."""
    key = library._reward_key(manager)
    assert key is not None
    if "tokenizer" in key.get("arguments", {}):
        key["arguments"]["tokenizer"] = str(ROOT / START)
    part = FunctionConfig(**complete_function("reward.function", key))
    source_file = find_carried(part.function.rpartition(":")[0], part.sha256)
    scorer = SampleScorer(Plan(((part, source_file),), {}))
    return scorer.score(reward_inputs("12+34=", response, truth, source, extra_info))


SCORES = [
    (verl_script.make_manager(None, 0), "#### 46", "46", "openai/gsm8k", 1.0),
    (verl_script.make_manager(None, 0), "46", "46", "half", 0.5),
    (verl_script.Selecting(None, 0), "46", "46", "openai/gsm8k", 0.5),
    (verl_script.Calling(None, 0, bonus=2.0), "46", "46", "half", 2.5),
    (verl_script.Calling(None, 0), "47", "46", "half", 0.0),
    (RewardManager(None, 0, partial(verl_script.weighted, weight=3.0)), "46",
     {"target": ["a", "b"]}, "any", 6.0),
]  # fmt: skip


@pytest.mark.parametrize(("manager", "response", "truth", "source", "score"), SCORES)
def test_a_manager_scores_as_in_verl(manager, response, truth, source, score):
    extra = {STRUCTURED: truth} if isinstance(truth, dict) else {}
    assert score_by(manager, response, json.dumps(truth) if extra else truth, source,
                    **extra).score == score  # fmt: skip


def test_a_score_has_text_and_numbers_beside_it():
    by_manager = score_by(verl_script.WithExtras(None, 0), "46", "46", "any", level="hard")
    assert by_manager.parts == {"WithExtras": 2.0, "WithExtras/level": "hard"}  # of two tokens
    manager = RewardManager(None, 0, verl_script.weighted)
    result = score_by(manager, "46", "", "any", **{STRUCTURED: {"target": ["a"]}})
    assert result.parts == {"weighted": 1.0, "weighted/pred": "46"}


def test_a_script_passes_verls_arguments(make):
    def rows(path):
        return RLHFDataset(path, tokenizer=None, config=None)

    found = make(
        train_dataset=rows(f"{START}/prompts.jsonl"), val_dataset=rows([f"{START}/prompts.jsonl"]),
        train_sampler=SequentialSampler([]), collate_fn=api.collate_fn, processor=None,
        device_name="cpu",
    )  # fmt: skip
    data = found.config.data
    assert data.train_files == data.val_files == (str(ROOT / START / "prompts.jsonl"),)
    assert not data.shuffle and found.config.device.kind is enums.DeviceKind.CPU
    assert len(rows(f"{START}/prompts.jsonl")) > 0


def test_roles_have_verls_numbers():
    numbers = [Role.Actor, Role.Rollout, ACTOR, Role.Critic, REF, Role.RewardModel,
               Role.ActorRolloutRef]  # fmt: skip
    assert [Role(number) for number in range(7)] == numbers
    with pytest.raises(ValueError, match="7 is not a valid Role"):
        Role(7)


def test_a_changed_tokenizer_is_used_and_an_unchanged_one_is_its_folder(make, tmp_path):
    tokenizer = AutoTokenizer.from_pretrained(str(ROOT / START))
    out = {"trainer.default_local_dir": str(tmp_path / "run")}
    assert make(tokenizer=tokenizer, config=out).config.training.tokenizer_name_or_path == str(
        ROOT / START
    )
    tokenizer.chat_template = "{{ messages[0].content }}!"
    path = make(tokenizer=tokenizer, config=out).config.training.tokenizer_name_or_path
    assert path.startswith(str(tmp_path / "run.tokenizer"))
    assert AutoTokenizer.from_pretrained(path).chat_template == tokenizer.chat_template


def test_a_run_joins_the_cluster_of_its_script_whose_cpus_count(make, monkeypatch):
    monkeypatch.setattr(library, "connected_address", lambda: "10.0.0.1:6379")
    monkeypatch.setattr(library, "has_resource", lambda name: False)
    config = make(config={"+device.kind": "cpu"}).config
    assert (config.runtime.address, config.device.resource_name) == ("10.0.0.1:6379", "CPU")
    monkeypatch.setattr(library, "has_resource", lambda name: True)
    assert make(config={"+device.kind": "cpu"}).config.device.resource_name == "rlxf_cpu"


class Theirs(Enum):
    Critic = 3


class OldActor(ActorRolloutRefWorker):
    def update_actor(self, data):
        return data


class OldCritic(CriticWorker):
    def update_critic(self, data):
        return data


CASES = {
    "must have roles of mindspeed_rlxf.api": ({**PPO, Theirs.Critic: CriticWorker}, {}),
    "=OldActor must not override update_actor": ({**PPO, ACTOR: OldActor}, {}),
    "=OldCritic must not override update_critic": ({**PPO, Role.Critic: OldCritic}, {}),
    "processor=int is not supported": (PPO, {"processor": 1}),
    "train_dataset=list is not supported": (PPO, {"train_dataset": [1]}),
    "train_sampler=list is not supported": (PPO, {"train_sampler": [1]}),
    "reward_fn=Nothing must be a RewardManager": (PPO, {"reward_fn": verl_script.Nothing()}),
    "must be a number, text or list in the attribute judge": (
        PPO, {"reward_fn": verl_script.Unmade(None, print)},
    ),
    "compute_score must have its arguments by name": (
        PPO, {"reward_fn": RewardManager(None, 0, partial(verl_script.half, "x"))},
    ),
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
    assert library._read(mine).sections["training"] == {"run_name": "x"}
    assert library._read(config).sections["training"]["run_name"] == "library_ppo"
