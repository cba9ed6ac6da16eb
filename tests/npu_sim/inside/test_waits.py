"""The host launches micro-batches without waiting for the device."""

import collections
import dataclasses
import sys
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

PACKAGE = str(Path(__file__).resolve().parents[3] / "mindspeed_rlxf")
Waits = collections.Counter[str]
"""Cause, and the two innermost functions of the package -> number of waits."""
NORM = "engine/step_guard.py:step engine/step_guard.py:_checked_norm"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a random language model and one with a score head."""
    from tests.distributed import llamas

    folder = tmp_path_factory.mktemp("waits")
    llamas.make_pair(folder, llamas.PLAIN)
    return folder


@pytest.fixture
def alone() -> Iterator[None]:
    """A world of this process alone."""
    from mindspeed_rlxf.cluster.local import LocalRuntime
    from mindspeed_rlxf.config.enums import DeviceKind

    runtime = LocalRuntime(DeviceKind.NPU, timeout_s=60.0)
    yield
    runtime.shutdown()


@pytest.fixture
def count(device: Any) -> Iterator[Callable[..., Waits]]:
    """Return the waits of a call."""

    def counted(call: Callable[..., Any], *arguments: Any) -> Waits:
        waits: Waits = collections.Counter()

        def note(cause: str) -> None:
            frames = traceback.extract_stack(sys._getframe(1))
            if "npu_sim/library" in frames[-1].filename:
                return  # its operators look at their arguments
            ours = [f"{f.filename[len(PACKAGE) + 1 :]}:{f.name}" for f in frames
                    if f.filename.startswith(PACKAGE)]  # fmt: skip
            waits[" ".join([cause, *ours[-2:]])] += 1

        device.on_wait(note)
        call(*arguments)
        device.on_wait(None)
        return waits

    yield counted
    device.on_wait(None)


KL_LOSS = {"kl_in": "loss", "kl_ctrl": {"kl_coef": 0.1}}
OBJECTIVES = {
    "ppo": {},
    "gspo": {"actor_rollout": {"policy_loss": "gspo"}},
    "means of responses and KL": {"algorithm": {"loss_normalizer": "sequence_means", **KL_LOSS}},
    "differences to the rollout": {
        "algorithm": {"old_log_probs": "auto", **KL_LOSS},
        "actor_rollout": {"ppo_mini_batch_size": 4},
    },
    "pairs": {"training": {"stage": "ray_online_dpo"}},
}


def make_role(folder: Path, role: Any, sections: Any) -> Any:
    from tests.distributed import llamas

    models = folder / "lm", folder / "scored"
    return role(llamas.run_config(*models, llamas.PLAIN, {"micro_batch_size": 2}, **sections))


def update_waits(count: Callable[..., Waits], update: Callable[..., Any]) -> tuple[Waits, Waits]:
    """Return the waits of a step of one micro-batch, and of one of four."""
    from tests.distributed import samples

    rollouts = samples.make_rollouts()
    rollouts = dataclasses.replace(rollouts, prompt_ids=rollouts.prompt_ids[[0, 0, *range(2, 8)]])
    experience = samples.make_experience(rollouts)
    ref = experience.old_log_probs - 0.1
    experience = dataclasses.replace(experience, ref_log_probs=ref)
    update(rollouts, experience, [[0, 1]])  # makes the optimizer's state
    one, four = (count(update, rollouts, experience, [[*range(n)]]) for n in (2, 8))
    return one, four


@pytest.mark.parametrize("sections", OBJECTIVES.values(), ids=OBJECTIVES)
def test_an_update_waits_for_its_gradient_norm_alone(
    alone: None, folder: Path, count: Callable[..., Waits], sections: Any
) -> None:
    """And then, when the device has nothing left to do, for the other ranks' opinion of it."""
    from mindspeed_rlxf.roles.actor import ActorRole

    actor = make_role(folder, ActorRole, sections)
    one, four = update_waits(count, actor.update_policy)
    assert four == one == {f"{cause} {NORM}": 1 for cause in ("scalar", "copy")}


def test_a_value_model_waits_for_its_gradient_norm_alone(
    alone: None, folder: Path, count: Callable[..., Waits]
) -> None:
    from mindspeed_rlxf.roles.critic import CriticRole

    critic = make_role(folder, CriticRole, {})
    one, four = update_waits(count, critic.update_critic)
    assert four == one == {f"{cause} {NORM}": 1 for cause in ("scalar", "copy")}


def test_forward_passes_wait_for_their_result_alone(
    alone: None, folder: Path, count: Callable[..., Waits]
) -> None:
    from mindspeed_rlxf.roles.actor import ActorRole
    from tests.distributed import samples

    engine = make_role(folder, ActorRole, {}).engine
    waits = count(engine.log_probs, samples.make_rollouts(), 1.0)
    assert waits == {"copy engine/common.py:log_probs engine/outputs.py:scatter_rows": 1}


def test_pageable_copies_and_values_on_the_host_are_waits(device: Any) -> None:
    import torch

    causes: list[str] = []
    device.on_wait(causes.append)
    tensor = torch.ones(2).to("npu", non_blocking=True)
    assert causes == ["copy"]
    pinned = torch.ones(2, pin_memory=True).to("npu", non_blocking=True)
    torch.empty(2, pin_memory=True).copy_(pinned, non_blocking=True)
    assert causes == ["copy"]
    tensor.sum().item()
    tensor[tensor > 0].nonzero()
    tensor.cpu()
    device.on_wait(None)
    assert set(causes[1:]) == {"scalar", "index", "nonzero", "copy"}
