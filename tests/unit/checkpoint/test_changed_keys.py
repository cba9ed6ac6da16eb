"""Which keys a resumed run may change."""

import copy
import functools
from collections.abc import Callable
from typing import Any

import pytest
import yaml

from mindspeed_rlxf.checkpoint.directory import Change, find_changes
from mindspeed_rlxf.config.keys import to_yaml
from mindspeed_rlxf.config.load import resolve

MakeTree = Callable[..., dict[str, Any]]


@pytest.fixture
def tree(make_tree: MakeTree) -> dict[str, Any]:
    """The configuration as a run directory has it."""
    return yaml.safe_load(to_yaml(resolve(make_tree({}), "test")))


def changed(tree: dict[str, Any], key: str, value: Any) -> dict[str, Any]:
    result = copy.deepcopy(tree)
    *path, last = key.split(".")
    functools.reduce(dict.__getitem__, path, result)[last] = value
    return result


@pytest.mark.parametrize(("key", "value", "rule"), [
    ("training.train_iters", 100, "free"), ("training.seed", 77, "fixed"),
    ("training.tokenizer_name_or_path", "/other", "fixed"), ("actor_rollout.lr", 0.5, "free"),
    ("actor_rollout.load", "/other", "free"), ("ref.load", "/other", "fixed"),
    ("actor_rollout.tensor_model_parallel_size", 4, "reshard"),
    ("actor_rollout.clip_ratio", 0.9, "fixed"), ("resource_pool.wait_s", 5.0, "free"),
    ("resource_pool.another", [4], "reshard"), ("data.train_files", ["other.jsonl"], "fixed"),
    ("critic.offload.weights", True, "free"),
])  # fmt: skip
def test_each_key_has_the_rule_of_the_schema(tree, key, value, rule):
    (found,) = find_changes(tree, changed(tree, key, value))
    assert (found.key, found.now, found.rule) == (key, value, rule)


@pytest.mark.parametrize(("key", "value"), [("new_run", True), ("resume", "never")])
def test_keys_of_the_command_do_not_count(tree, key, value):
    assert find_changes(tree, changed(tree, f"training.{key}", value)) == []


def test_a_key_that_an_older_version_lacks_counts_as_its_default(tree):
    older = copy.deepcopy(tree)
    del older["training"]["keep_last"], older["algorithm"]["gamma"]
    assert find_changes(older, tree) == []
    (found,) = find_changes(older, changed(tree, "training.keep_last", 5))
    assert str(found) == "training.keep_last: 2 -> 5"


def test_a_key_that_this_version_does_not_have_is_refused(tree):
    newer = changed(tree, "algorithm.of_a_later_version", 1)
    (found,) = find_changes(newer, tree)
    assert (found.rule, str(found)) == ("fixed", "algorithm.of_a_later_version: 1 -> absent")


def test_a_changed_reward_function_is_named_by_its_file():
    before, now = ([{"function": "mine.py:score", "sha256": digest}] for digest in ("1", "2"))
    change = Change("reward.functions", before, now, "fixed")
    assert str(change) == "the file mine.py has changed"
