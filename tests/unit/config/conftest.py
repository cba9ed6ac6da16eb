"""A small valid tree, and fixtures that change it and return the problems of resolving it."""

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from mindspeed_rlxf.compat.mindspeed_llm.translate import translate
from mindspeed_rlxf.config import packages, ray_cluster
from mindspeed_rlxf.config.load import resolve
from mindspeed_rlxf.config.problems import ConfigError
from tests.registries import restored_registries

Tree = dict[str, Any]

TREE: Tree = {
    "model": {"small": {"num_layers": 4, "hidden_size": 64, "ffn_hidden_size": 96,
     "num_attention_heads": 8, "num_query_groups": 4, "vocab_size": 32,
     "max_position_embeddings": 64}},
    "training": {"model": "small", "load": "weights/sft", "train_iters": 3, "global_batch_size": 96,
     "seq_length": 24, "tokenizer_name_or_path": "weights/sft"},
    "actor_rollout": {"max_prompt_length": 8, "ppo_mini_batch_size": 48, "lr": 1e-4},
    "critic": {"critic_mini_batch_size": 32}, "reward": {"kind": "rule"},
    "data": {"train_files": "train.jsonl"},
    "placement": {"actor_rollout": "main", "ref": "main", "critic": "main"},
    "resource_pool": {"main": 8}, "device": {"kind": "cpu"},
}  # fmt: skip

DROPPED = object()
WITHOUT_CRITIC = ("critic", "placement.critic")
GRPO = {
    "training.stage": "ray_grpo", "actor_rollout.do_sample": True,
    "actor_rollout.n_samples_per_prompt": 4,
}  # fmt: skip


@pytest.fixture(autouse=True)
def no_cluster(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hide Ray clusters, torchrun and the installed Megatron of this host from the rules."""
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr(ray_cluster, "find_local_cluster", lambda: None)
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    monkeypatch.setitem(packages.SOURCES, packages.MEGATRON, lambda: "0.16.1")


@pytest.fixture
def registries() -> Iterator[None]:
    """Forget after the test what files of the user registered."""
    with restored_registries():
        yield


@pytest.fixture
def make_tree() -> Callable[..., Tree]:
    """Return a copy of the valid tree with dotted keys set, `make_tree({"training.lr": 1})`, and
    the keys of `drop` removed."""

    def make(changes: Tree | None = None, drop: tuple[str, ...] = ()) -> Tree:
        tree = copy.deepcopy(TREE)
        for path, value in {**(changes or {}), **dict.fromkeys(drop, DROPPED)}.items():
            *sections, key = path.split(".")
            node = tree
            for section in sections:
                node = node.setdefault(section, {})
            node[key] = value
            if value is DROPPED:
                del node[key]
        return tree

    return make


@pytest.fixture
def problems(make_tree: Callable[..., Tree]) -> Callable[..., list[str]]:
    """Return the problems of the tree with these changes, as text; [] = it is valid.

    It may have MindSpeed-LLM's keys, as on the command line.
    """

    def run(changes: Tree | None = None, drop: tuple[str, ...] = ()) -> list[str]:
        try:
            resolve(translate(make_tree(changes, drop)), "test")
        except ConfigError as error:
            return [str(problem) for problem in error.problems]
        return []

    return run


@pytest.fixture
def check_case(problems: Callable[..., list[str]]) -> Callable[[Tree, list[str]], None]:
    """Assert that a changed tree has these problems, each given as `key=value part of the rest`.

    A change of `training.stage` also removes the critic.
    """

    def check(changes: Tree, expected: list[str]) -> None:
        found = problems(changes, WITHOUT_CRITIC if "training.stage" in changes else ())
        assert len(found) == len(expected), found
        for problem, text in zip(found, expected, strict=True):
            head, _, part = text.partition(" ")
            assert problem.startswith(head) and part in problem

    return check
