"""Layering, spellings, defaults that depend on other keys, and the messages of bad values."""

import math
import os
from operator import attrgetter
from typing import Any

import pytest

from mindspeed_rlxf.config.enums import Role
from mindspeed_rlxf.config.keys import TOP_LEVEL, known_keys
from mindspeed_rlxf.config.load import resolve
from mindspeed_rlxf.config.schema import ArchitectureConfig, OffloadConfig

# (changes, dropped keys, attributes of the configuration and their values)
RESOLVED: dict[str, tuple[dict[str, Any], tuple[str, ...], dict[str, Any]]] = {
    "role beats training beats model": (
        {"model.small.micro_batch_size": 2, "model.small.bf16": True,
         "training.micro_batch_size": 3, "ref.micro_batch_size": 5,
         "critic.critic_mini_batch_size": 24, "critic.num_layers": 2, "training.lr": 1e-3},
        (),
        {"ref.micro_batch_size": 5, "actor_rollout.micro_batch_size": 3, "critic.bf16": True,
         "actor_rollout.optimizer.lr": 1e-4, "critic.optimizer.lr": 1e-3,
         "critic.architecture.num_layers": 2, "actor_rollout.architecture.num_layers": 4},
    ),
    "dashes in keys are underscores": (
        {"actor_rollout.max-new-tokens": 5, "resource-pool": {"main": 8}},
        ("resource_pool",),
        {"actor_rollout.max_new_tokens": 5, "resource_pool": {"main": [8]}},
    ),
    "new tokens default to the rest of the sequence": (
        {}, (), {"actor_rollout.max_new_tokens": 24 - 8}
    ),
    "a run is named after its config": (
        {}, (),
        {"training.run_name": "test", "training.output_dir": os.path.abspath("outputs/test")},
    ),
    "paths are absolute from the working folder": (
        {"data.val_files": ["a.jsonl", "/b.jsonl"]}, (),
        {"actor_rollout.load": os.path.abspath("weights/sft"),
         "training.tokenizer_name_or_path": os.path.abspath("weights/sft"),
         "data.train_files": (os.path.abspath("train.jsonl"),),
         "data.val_files": (os.path.abspath("a.jsonl"), "/b.jsonl")},
    ),
    "prefixes of data sets are absolute and take the place of files": (
        {"data.data_path": "a/b", "data.val_data_path": ["c"], "validation.interval": 2},
        ("data.train_files",),
        {"data.data_path": (os.path.abspath("a/b"),), "data.train_files": (),
         "data.val_data_path": (os.path.abspath("c"),)},
    ),
    "a rule needs no model": (
        {"reward.tensor_model_parallel_size": 3}, (),
        {"reward.architecture": None, "reward.model": None, "placement": {
            Role.ACTOR_ROLLOUT: "main", Role.REF: "main", Role.CRITIC: "main", Role.REWARD: "main",
        }, "reward.tensor_model_parallel_size": 1},
    ),
    "roles have pools of their own name by default": (
        {"resource_pool": {"actor_rollout": [2], "ref": 1, "critic": [1], "reward": []}},
        ("placement",),
        {"placement": {
            Role.ACTOR_ROLLOUT: "actor_rollout", Role.REF: "ref", Role.CRITIC: "critic",
            Role.REWARD: "actor_rollout",
        }, "resource_pool": {"actor_rollout": [2], "ref": [1], "critic": [1]}},
    ),
    "layers of a section of a role merge key by key": (
        {"reward.kind": "model", "placement.reward": "main",
         "model.small.offload": {"weights": True}, "training.offload": {"optimizer": True},
         "critic.offload": {"weights": False}},
        (),
        {"actor_rollout.offload": OffloadConfig(weights=True, optimizer=True),
         "critic.offload": OffloadConfig(optimizer=True),
         "ref.offload": OffloadConfig(weights=True), "reward.offload": OffloadConfig(weights=True)},
    ),
}  # fmt: skip


@pytest.mark.parametrize(("changes", "drop", "values"), RESOLVED.values(), ids=RESOLVED)
def test_keys_arrive_in_the_configuration(make_tree, changes, drop, values):
    config = resolve(make_tree(changes, drop), "test")
    assert {path: attrgetter(path)(config) for path in values} == values


@pytest.mark.parametrize("outer", [None, "actor_rollout_ref"])
def test_the_older_section_actor_means_actor_rollout(make_tree, problems, outer):
    tree = make_tree({})
    older = make_tree({})
    (older.setdefault(outer, {}) if outer else older)["actor"] = older.pop("actor_rollout")
    assert resolve(older, "test") == resolve(tree, "test")
    path = f"{outer}.actor" if outer else "actor"
    assert problems({f"{path}.lr_": 1})[0].startswith(f"{path}.lr_: unknown key")


NESTED = "actor_rollout_ref.actor_rollout"


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({f"{NESTED}.lr": 0.5}, [f"{NESTED}.lr"]),
        ({f"{NESTED}.lr": 1e-4}, []),
        ({f"{NESTED}.micro_batch_size": 5},
         [f"actor_rollout.ppo_mini_batch_size=48 use {NESTED}.micro_batch_size=6"]),
        ({f"{NESTED}.temperature": math.nan}, [f"{NESTED}.temperature=.nan"]),
        ({"actor_rollout_ref.ref.micro_batch_size": 0, "actor_rollout_ref.ref.lr_": 1},
         ["actor_rollout_ref.ref.micro_batch_size=0", "actor_rollout_ref.ref.lr_:"]),
        ({"actor_rollout.ppo_mini_batch_size": -4}, ["actor_rollout.ppo_mini_batch_size=-4"]),
        ({"actor_rollout.tensor_model_parallel_size": "two"},
         ["actor_rollout.tensor_model_parallel_size='two'"]),
        ({"reward.kind": "model", "reward.model": "smal", "placement.reward": "main"},
         ["reward.model='smal'"]),
    ],
)  # fmt: skip
def test_one_mistake_is_one_problem_with_the_key_as_it_was_written(check_case, changes, expected):
    check_case(changes, expected)


def test_keys_are_named_where_the_user_wrote_them(problems):
    within = {"training.min_lr": 1.0, "training.lr_decay_style": "cosine"}
    line = "training.min_lr=1 must be at most actor_rollout.lr=0.0001; use 0.0001 or less"
    assert line in problems(within)
    (across,) = problems({"training.max_tokens_per_micro_batch": 23})  # of three roles
    assert across.startswith("training.max_tokens_per_micro_batch=23 must be at least training.se")


@pytest.mark.parametrize(
    ("key", "remedy"),
    [
        ("training.trian_iters", "did you mean training.train_iters?"),
        ("trainig", "did you mean training?"),
        ("actor_rollout.clip_ration", "did you mean actor_rollout.clip_ratio?"),
        ("algorithm.kl_ctrl.kl_coeff", "did you mean algorithm.kl_ctrl.kl_coef?"),
        ("model.small.num_layer", "did you mean model.small.num_layers?"),
        ("training.gamma", "did you mean algorithm.gamma?"),  # right word, wrong section
        ("actor_rolout", "did you mean actor_rollout?"),
        ("placement.actor", "did you mean placement.actor_rollout?"),
        ("actor_rollout_ref.reff", "did you mean actor_rollout_ref.ref?"),
        ("ref.lr", "did you mean actor_rollout.lr?"),  # the reference has no optimizer
        ("data.zzzz", "remove it"),
        # of TRL and verl
        ("actor_rollout.learning_rate", "did you mean actor_rollout.lr?"),
        ("training.max_response_length", "did you mean training.max_new_tokens?"),
    ],
)
def test_unknown_key_is_named_with_the_nearest_known_one(problems, key, remedy):
    (problem,) = problems({key: 1})
    assert problem == f"{key}: unknown key; {remedy}"


def test_a_key_in_a_list_is_named_with_the_nearest_known_one(problems):
    (line,) = problems({"reward.functions": [{"function": "length", "wieght": 2}]})
    assert line.endswith("did you mean reward.functions.0.weight?")


def test_a_wrong_truth_value_names_the_legal_ones(problems):
    (line,) = problems({"actor_rollout.do_sample": "yes"})
    assert line == "actor_rollout.do_sample='yes' must be true or false; did you mean true?"


@pytest.mark.parametrize(
    ("key", "value", "shown"),
    [
        ("training.train_iters", 0, "=0"), ("training.train_iters", "ten", "='ten'"),
        ("training.train_iters", True, "=true"), ("training.global_batch_size", None, "=null"),
        ("training.run_name", 7, "=7"), ("training.run_name", "", "=''"),
        ("training.tokenizer_type", "Llama", "='Llama'"), ("actor_rollout.lr", "fast", "='fast'"),
        ("actor_rollout.temperature", 0, "=0"), ("actor_rollout.top_p", 1.5, "=1.5"),
        ("actor_rollout.do_sample", "yes", "='yes'"), ("actor_rollout.stop_token_ids", 3, "=3"),
        ("actor_rollout.lr_warmup_fraction", 1.0, "=1.0"),
        ("critic.cliprange_value", float("nan"), "=.nan"), ("algorithm.kl_penalty", "k3", "='k3'"),
        ("algorithm.kl_ctrl", 0.1, "=0.1"), ("reward.kind", "nosuch", "='nosuch'"),
        ("logging.samples", -1, "=-1"), ("data.train_files", [], ""),
        ("data", "x.jsonl", "='x.jsonl'"), ("resource_pool.main", "two", "='two'"),
        ("resource_pool.main", [2, -1], "=[2,"), ("critic.model", "smal", "='smal'"),
        ("runtime", "locl", ".kind='locl'"), ("dry_run", 1, "=1"), ("training.seq_length", 8, "=8"),
    ],
)  # fmt: skip
def test_bad_value_is_named_with_rule_and_remedy(problems, key, value, shown):
    found = problems({key: value})
    assert [p for p in found if p.startswith(f"{key}{shown} ") and "; " in p], found
    if key != "data":
        assert len(found) == 1, found


@pytest.mark.parametrize(
    "key",
    ["training.train_iters", "training.tokenizer_name_or_path", "data.train_files", "training.load",
     "training.model", "resource_pool", "model.small.num_layers"],
)  # fmt: skip
def test_missing_key_is_required(problems, key):
    found = problems(drop=(key,))
    name = key.rsplit(".", 1)[-1]
    assert len(found) == (3 if name in ("load", "model") else 1)  # actor, reference, critic
    assert all(f"{name} is required" in problem for problem in found)


GARBAGE = [None, -1, 10**9, "x", [[1]], {"x": 1}]
MORE_GARBAGE = [True, 0, 1.5, "", [], [None], {}, {"x": {"y": 1}}]


@pytest.mark.parametrize(
    "garbage",
    [*GARBAGE, *(pytest.param(value, marks=pytest.mark.long) for value in MORE_GARBAGE)],
    ids=repr,
)
def test_any_value_anywhere_is_accepted_or_explained(problems, garbage):
    """Each is resolved or refused with one-line problems; nothing else is ever raised."""
    known = [f"{section}.{key}" for section, keys in known_keys().items() for key in keys]
    models = [f"model.small.{key}" for key in ArchitectureConfig.model_fields]
    pools = ["resource_pool.main", "resource_pool.new", "model.small", "model.new"]
    for path in sorted({*known, *models, *pools, *TOP_LEVEL}):
        found = problems({path: garbage})
        assert all(problem and "\n" not in problem for problem in found), (path, found)
