"""Critics that are not trained: their attention layers, or all after some iterations."""

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from tests.distributed.test_slices import assert_same, run, run_with_kills
from tests.golden.runs import START

ATTENTION = {"critic.freeze": "attention", "training.save_interval": 1}


def critic_of(out: Path) -> dict[str, Tensor]:
    tensors: dict[str, Tensor] = {}
    for file in (out / "final" / "critic_hf").rglob("*.safetensors"):
        tensors |= load_file(file)
    return tensors


def test_attention_stays_what_was_loaded_and_the_rest_learns(
    warm_runtime: Any, tmp_path: Path
) -> None:
    whole = run("ppo", tmp_path / "whole", warm_runtime, **ATTENTION)
    loaded, trained = load_file(START / "model.safetensors"), critic_of(tmp_path / "whole")
    compared = loaded.keys() & trained.keys()  # all but the heads
    assert len(compared) == len(trained) - 1
    for name in compared:
        is_frozen = ".self_attn." in name
        assert torch.equal(loaded[name], trained[name]) == is_frozen, name
    killed = run_with_kills("ppo", tmp_path / "killed", warm_runtime, [1], **ATTENTION)
    assert_same(killed, whole)


def test_a_frozen_critic_is_that_of_the_iterations_before(
    warm_runtime: Any, tmp_path: Path
) -> None:
    first = {"training.train_iters": 1, "rollout.max_staleness": 0}
    run("ppo", tmp_path / "first", warm_runtime, **first)
    second = {**first, "training.train_iters": 2, "critic.freeze_after": 1}
    frozen = run("ppo", tmp_path / "frozen", warm_runtime, **second)
    once, twice = critic_of(tmp_path / "first"), critic_of(tmp_path / "frozen")
    assert all(torch.equal(once[name], twice[name]) for name in once)
    trained = ["critic/vf_loss" in line["metrics"] for line in frozen.metrics]
    assert trained == [True, False]
