"""Layering, spellings, defaults that depend on other keys, and the messages of bad values."""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mindspeed_rlxf.config.enums import CONFIGURED, DeviceKind, KlPenalty, Role, RuntimeKind
from mindspeed_rlxf.config.keys import ARCHITECTURE_KEYS, TOP_LEVEL, known_keys
from mindspeed_rlxf.config.resolve import resolve

MakeTree = Callable[..., dict[str, Any]]
Problems = Callable[..., list[str]]


def test_role_beats_training_beats_model(make_tree: MakeTree) -> None:
    changes = {
        "model.small.micro_batch_size": 2,
        "model.small.bf16": True,
        "training.micro_batch_size": 3,
        "ref.micro_batch_size": 5,
        "critic.critic_mini_batch_size": 24,
        "critic.num_layers": 2,
        "training.lr": 1e-3,
    }
    config = resolve(make_tree(changes), "test")
    assert config.ref.micro_batch_size == 5  # its own section
    assert config.actor_rollout.micro_batch_size == 3  # training
    assert config.critic.bf16  # model
    assert config.actor_rollout.optimizer.lr == 1e-4  # its own
    assert config.critic.optimizer.lr == 1e-3  # training
    assert config.critic.architecture.num_layers == 2
    assert config.actor_rollout.architecture.num_layers == 4


def test_older_nesting_of_roles_means_the_same(make_tree: MakeTree) -> None:
    tree = make_tree({"ref.bf16": True})
    nested = make_tree({"ref.bf16": True})
    nested["actor_rollout_ref"] = {name: nested.pop(name) for name in ("actor_rollout", "ref")}
    assert resolve(nested, "test") == resolve(tree, "test")


def test_one_key_in_both_nestings_is_an_error(problems: Problems) -> None:
    assert problems({"actor_rollout_ref.actor_rollout.lr": 0.5}) == [
        "actor_rollout_ref.actor_rollout.lr and actor_rollout.lr are the same key; keep one"
    ]
    assert problems({"actor_rollout_ref.actor_rollout.lr": 1e-4}) == []


def test_a_nan_in_the_older_nesting_is_not_taken_for_two_keys(problems: Problems) -> None:
    (problem,) = problems({"actor_rollout_ref.actor_rollout.temperature": math.nan})
    assert "same key" not in problem and problem.startswith("actor_rollout_ref.actor_rollout.temp")


def test_errors_name_the_key_as_it_was_nested(problems: Problems) -> None:
    found = problems({"actor_rollout_ref.ref.micro_batch_size": 0, "actor_rollout_ref.ref.lr_": 1})
    assert found[0].startswith("actor_rollout_ref.ref.lr_: unknown key")
    assert found[1].startswith("actor_rollout_ref.ref.micro_batch_size=0 must be at least 1")


def test_dashes_in_keys_are_underscores(make_tree: MakeTree) -> None:
    changes = {"actor_rollout.max-new-tokens": 5, "resource-pool": {"main": 8}}
    tree = make_tree(changes, drop=("resource_pool",))
    config = resolve(tree, "test")
    assert config.actor_rollout.max_new_tokens == 5
    assert config.resource_pool == {"main": [8]}


def test_names_that_users_choose_keep_their_dashes(make_tree: MakeTree) -> None:
    tree = make_tree({"training.model": "small-1b", "reward.rules": {"my-data": "exact_match"}})
    tree["model"] = {"small-1b": tree["model"]["small"]}
    config = resolve(tree, "test")
    assert config.ref.model == "small-1b"
    assert config.reward.rules == {"my-data": "exact_match"}


def test_new_tokens_default_to_the_rest_of_the_sequence(
    make_tree: MakeTree, problems: Problems
) -> None:
    assert resolve(make_tree(), "test").actor_rollout.max_new_tokens == 16  # 24 - 8
    (problem,) = problems({"training.seq_length": 8})
    assert "training.seq_length=8 must exceed actor_rollout.max_prompt_length=8" in problem


def test_run_is_named_after_its_config(make_tree: MakeTree) -> None:
    training = resolve(make_tree(), "test").training
    assert training.run_name == "test"
    assert training.output_dir == os.path.abspath("outputs/test")
    named = resolve(make_tree({"training.run_name": "mine"}), "test").training
    assert named.output_dir == os.path.abspath("outputs/mine")


def test_paths_are_absolute_from_the_working_folder(
    make_tree: MakeTree, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    config = resolve(make_tree({"data.val_files": ["a.jsonl", "/b.jsonl"]}), "test")
    assert config.actor_rollout.load == str(tmp_path / "weights/sft")
    assert config.training.tokenizer_name_or_path == str(tmp_path / "weights/sft")
    assert config.data.train_files == (str(tmp_path / "train.jsonl"),)
    assert config.data.val_files == (str(tmp_path / "a.jsonl"), "/b.jsonl")


def test_prefixes_of_data_sets_are_absolute_and_take_the_place_of_files(
    make_tree: MakeTree, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    changes = {"data.data_path": "a/b", "data.val_data_path": ["c"], "validation.interval": 2}
    data = resolve(make_tree(changes, drop=("data.train_files",)), "test").data
    assert data.data_path == (str(tmp_path / "a/b"),)
    assert data.val_data_path == (str(tmp_path / "c"),)
    assert data.train_files == ()


def test_runtime_may_be_one_word(make_tree: MakeTree) -> None:
    tree = make_tree({"runtime": "local", "resource_pool.main": 1})
    assert resolve(tree, "test").runtime.kind is RuntimeKind.LOCAL


def test_words_become_enums(make_tree: MakeTree) -> None:
    config = resolve(make_tree({"algorithm.kl_penalty": "low_var_kl"}), "test")
    assert config.algorithm.kl_penalty is KlPenalty.LOW_VAR_KL
    assert config.device.kind is DeviceKind.CPU


def test_a_rule_needs_no_model_and_sits_with_the_actor(make_tree: MakeTree) -> None:
    config = resolve(make_tree({"reward.tensor_model_parallel_size": 3}), "test")
    assert config.reward.architecture is None and config.reward.model is None
    assert config.pool_of(Role.REWARD) == "main"
    assert config.layout(Role.REWARD).tp == 1  # model keys mean nothing to a rule


def test_roles_have_pools_of_their_own_name_by_default(make_tree: MakeTree) -> None:
    pools = {"actor_rollout": [2], "ref": 1, "critic": [1], "reward": []}
    tree = make_tree({"resource_pool": pools}, drop=("placement",))
    config = resolve(tree, "test")
    assert [config.pool_of(role) for role in CONFIGURED] == [
        "actor_rollout", "ref", "critic", "actor_rollout",
    ]  # fmt: skip
    assert config.resource_pool == {"actor_rollout": [2], "ref": [1], "critic": [1]}


@pytest.mark.parametrize(
    ("key", "remedy"),
    [
        ("training.trian_iters", "did you mean training.train_iters?"),
        ("trainig", "did you mean training?"),
        ("actor_rollout.clip_ration", "did you mean actor_rollout.clip_ratio?"),
        ("algorithm.kl_ctrl.kl_coeff", "did you mean algorithm.kl_ctrl.kl_coef?"),
        ("model.small.num_layer", "did you mean model.small.num_layers?"),
        ("training.gamma", "did you mean algorithm.gamma?"),  # right word, wrong section
        ("actor", "did you mean actor_rollout?"),
        ("placement.actor", "did you mean placement.actor_rollout?"),
        ("actor_rollout_ref.reff", "did you mean actor_rollout_ref.ref?"),
        ("ref.lr", "did you mean actor_rollout.lr?"),  # the reference has no optimizer
        ("data.zzzz", "remove it"),
    ],
)
def test_unknown_key_is_named_with_the_nearest_known_one(
    problems: Problems, key: str, remedy: str
) -> None:
    (problem,) = problems({key: 1})
    assert problem == f"{key}: unknown key; {remedy}"


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("training.train_iters", 0, "=0 must be at least 1; use 1 or more"),
        ("training.train_iters", -5, "=-5 must be at least 1; use 1 or more"),
        ("training.train_iters", "ten", "='ten' must be an integer; write a whole number"),
        ("training.train_iters", 2.5, "=2.5 must be an integer"),
        ("training.train_iters", True, "=true must be an integer"),
        ("training.global_batch_size", [8], "=[8] must be an integer"),
        ("training.global_batch_size", None, "=null must be an integer"),
        ("training.run_name", 7, "=7 must be text; put it in quotes"),
        ("training.run_name", "", "='' must not be empty; give a name"),
        ("training.tokenizer_type", "Llama", "='Llama' must be PretrainedFromHF; use Pretrained"),
        ("actor_rollout.lr", "fast", "='fast' must be a number"),
        ("actor_rollout.lr", -1e-6, "=-1e-06 must be at least 0"),
        ("actor_rollout.temperature", 0, "=0 must be greater than 0; use more than 0"),
        ("actor_rollout.top_p", 1.5, "=1.5 must be at most 1; use 1 or less"),
        ("actor_rollout.do_sample", "yes", "='yes' must be true or false"),
        ("actor_rollout.stop_token_ids", 3, "=3 must be a list; write [a, b]"),
        ("actor_rollout.lr_warmup_fraction", 1.0, "=1.0 must be less than 1; use less than 1"),
        ("critic.cliprange_value", float("nan"), "=.nan must be finite"),
        ("algorithm.gamma", -0.1, "=-0.1 must be at least 0"),
        ("algorithm.kl_penalty", "k3", "='k3' must be one of kl, abs, mse, low_var_kl, full; "),
        ("algorithm.kl_ctrl", 0.1, "=0.1 must be a section of keys"),
        ("algorithm.adv_estimator", "grop", "='grop' must be one of gae, grpo, dr_grpo, rloo, "),
        ("model.small.num_layers", "two", "='two' must be an integer"),
        ("training.bf16", 1, "=1 must be true or false"),
        ("logging.samples", "some", "='some' must be an integer or all"),
        ("logging.samples", -1, "=-1 must be at least 0 or all"),
        ("data.train_files", [], " is required; name files of prompts, or an indexed data set"),
        ("data", "x.jsonl", "='x.jsonl' must be a section of keys"),
        ("resource_pool.main", 0, "=0 must be a number of devices from 1 to 100000"),
        ("resource_pool.main", "two", "='two' must be a number of devices"),
        ("resource_pool.main", [2, -1], "=[2, -1] must be a number of devices"),
        ("critic.model", "smal", "='smal': no such model; did you mean small?"),
        ("runtime", "locl", ".kind='locl' must be one of ray, local; did you mean local?"),
        ("dry_run", 1, "=1 must be true or false"),
    ],
)
def test_bad_value_is_named_with_rule_and_remedy(
    problems: Problems, key: str, value: Any, message: str
) -> None:
    found = problems({key: value})
    assert [p for p in found if p.startswith(key + message)], found
    if key != "data":
        assert len(found) == 1, found


@pytest.mark.parametrize(
    "key",
    ["training.train_iters", "training.tokenizer_name_or_path", "data.train_files", "training.load",
     "training.model", "resource_pool", "model.small.num_layers"],
)  # fmt: skip
def test_missing_key_is_required(problems: Problems, key: str) -> None:
    found = problems(drop=(key,))
    name = key.rsplit(".", 1)[-1]
    assert len(found) == (3 if name in ("load", "model") else 1)  # actor, reference, critic
    assert all(f"{name} is required" in problem for problem in found)


def test_all_problems_come_at_once(problems: Problems) -> None:
    found = problems(
        {
            "training.trian_iters": 3,
            "training.train_iters": 0,
            "training.global_batch_size": 100,
            "actor_rollout.lr": "fast",
            "critic.tensor_model_parallel_size": 3,
        }
    )
    starts = [
        "training.trian_iters: unknown key",
        "training.train_iters=0 must be at least 1",
        "actor_rollout.lr='fast' must be a number",
        "resource_pool.main=8 must be a multiple of TP 3",
        "critic.tensor_model_parallel_size=3 must divide model.small.num_attention_heads=8",
    ]
    assert all(any(p.startswith(start) for p in found) for start in starts), found


def test_a_wrong_value_brings_no_second_problem(problems: Problems) -> None:
    (problem,) = problems({"actor_rollout.ppo_mini_batch_size": -4})
    assert problem == "actor_rollout.ppo_mini_batch_size=-4 must be at least 1; use 1 or more"
    assert len(problems({"actor_rollout.tensor_model_parallel_size": "two"})) == 1


def test_no_problem_hides_behind_a_broken_section_that_it_names(problems: Problems) -> None:
    """The critic's section cannot be read; the size of its pool is checked all the same."""
    changes = {"critic": 3, "placement.critic": "judge", "resource_pool": {"main": 8, "judge": 7}}
    found = problems(changes)
    assert any("the critic's data-parallel size 7" in problem for problem in found), found


GARBAGE = [None, True, 0, -1, 10**9, 1.5, "", "x", [], [None], [[1]], {}, {"x": 1}, {"x": {"y": 1}}]


@pytest.mark.parametrize("garbage", GARBAGE, ids=repr)
def test_any_value_anywhere_is_accepted_or_explained(problems: Problems, garbage: Any) -> None:
    """Each is resolved or refused with one-line problems; nothing else is ever raised."""
    known = [f"{section}.{key}" for section, keys in known_keys().items() for key in keys]
    models = [f"model.small.{key}" for key in ARCHITECTURE_KEYS]
    pools = ["resource_pool.main", "resource_pool.new", "model.small", "model.new"]
    for path in sorted({*known, *models, *pools, *TOP_LEVEL}):
        found = problems({path: garbage})
        assert all(problem and "\n" not in problem for problem in found), (path, found)


def test_a_reward_model_of_no_known_architecture_is_named(problems: Callable[..., Any]) -> None:
    changes = {"reward.kind": "model", "reward.model": "smal", "placement.reward": "main"}
    assert problems(changes) == [
        "reward.model='smal': no such model; did you mean small? (models loaded: small)"
    ]
