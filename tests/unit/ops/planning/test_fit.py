"""A plan that does not fit says so, with a remedy, where the memory is known."""

from __future__ import annotations

from collections import namedtuple
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mindspeed_rlxf.config.resolve import resolve
from mindspeed_rlxf.config.schema import RunConfig
from mindspeed_rlxf.ops.planning import available
from mindspeed_rlxf.ops.planning.fit import check_fit
from mindspeed_rlxf.ops.sizes import format_bytes

JOINED = {"device.kind": "cuda", "runtime.address": "head:6379"}
Usage = namedtuple("Usage", "total used free")


@pytest.fixture(autouse=True)
def large_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """Models here need more than a machine that tests may have."""
    monkeypatch.setattr(available.shutil, "disk_usage", lambda path: Usage(10**15, 0, 10**15))


@pytest.fixture
def config(make_tree: Callable[..., Any], tmp_path: Path) -> Callable[..., RunConfig]:
    folder = {"training.output_dir": str(tmp_path / "run")}
    return lambda changes: resolve(make_tree({**folder, **changes}), "test")


def section(config: RunConfig, title: str) -> str:
    return next(body for name, body in check_fit(config).sections.items() if name.startswith(title))


def test_unknown_memory_is_no_problem(config: Callable[..., RunConfig]) -> None:
    run = config(JOINED)
    assert check_fit(run).problems == []
    assert "memory of a device is unknown: set device.memory_gib" in section(
        run, "Memory per device, pool main"
    )


def test_known_memory_that_is_enough(config: Callable[..., RunConfig]) -> None:
    run = config({**JOINED, "device.memory_gib": 64})
    assert check_fit(run).problems == []
    assert "fits: needs" in section(run, "Memory per device, pool main")


def test_too_little_memory_is_a_problem_with_a_remedy(config: Callable[..., RunConfig]) -> None:
    # a process takes 512 MiB without any tensor
    run = config({**JOINED, "device.memory_gib": 0.25})
    (problem,) = map(str, check_fit(run).problems)
    assert problem.startswith("resource_pool.main: a device needs ")
    assert "has 256.0 MiB; " in problem
    assert "does not fit: needs" in section(run, "Memory per device, pool main")


def test_remedy_for_a_large_model_spreads_it(config: Callable[..., RunConfig]) -> None:
    large = {"model.small.vocab_size": 10**6, "actor_rollout.use_distributed_optimizer": True}
    run = config({**JOINED, **large, "device.memory_gib": 0.5})
    (problem,) = map(str, check_fit(run).problems)
    assert problem.endswith(
        "; set critic.use_distributed_optimizer=true or raise tensor_model_parallel_size or "
        "raise pipeline_model_parallel_size or set training.offload.optimizer=true or "
        "set training.offload.weights=true or place roles on pools of their own"
    )
    offload = {"training.offload": {"weights": True, "optimizer": True}}
    run = config({**JOINED, **large, **offload, "device.memory_gib": 0.5})
    (problem,) = map(str, check_fit(run).problems)
    assert "offload" not in problem


def test_remedy_for_experts_spreads_them(config: Callable[..., RunConfig]) -> None:
    experts = {"model.small.num_experts": 8, "model.small.moe_ffn_hidden_size": 10**5}
    run = config({**JOINED, **experts, "device.memory_gib": 0.5})
    (problem,) = map(str, check_fit(run).problems)
    assert "raise actor_rollout.expert_model_parallel_size or " in problem
    most = {"training.expert_model_parallel_size": 8}
    (problem,) = map(
        str, check_fit(config({**JOINED, **experts, **most, "device.memory_gib": 0.5})).problems
    )
    assert "expert_model_parallel_size" not in problem


LONG = {
    "model.small.max_position_embeddings": 4096,
    "training.seq_length": 4096,
    "actor_rollout.max_prompt_length": 2048,
    "actor_rollout.max_new_tokens": 2048,
    "device.memory_gib": 0.5,
    **JOINED,
}


@pytest.mark.parametrize(
    ("changes", "remedy"),
    [
        ({"actor_rollout.num_samples_per_step": 12}, "lower actor_rollout.num_samples_per_step"),
        (
            {"actor_rollout.num_samples_per_step": 1, "critic.micro_batch_size": 4},
            "lower critic.micro_batch_size",
        ),
        (
            {
                "actor_rollout.num_samples_per_step": 1,
                "critic.max_tokens_per_micro_batch": 4 * 4096,
            },
            "lower critic.max_tokens_per_micro_batch",
        ),
    ],
)
def test_remedy_lowers_the_largest_part(
    config: Callable[..., RunConfig], changes: dict[str, Any], remedy: str
) -> None:
    (problem,) = map(str, check_fit(config({**LONG, **changes})).problems)
    assert problem.endswith("; " + remedy)


def test_every_phase_has_a_line(config: Callable[..., RunConfig]) -> None:
    lines = section(config({}), "Memory per device, pool main").splitlines()
    assert [line.split()[:2] for line in lines[2:-1]] == [
        ["actor_rollout", "forward"],
        ["actor_rollout", "update"],
        ["actor_rollout", "optimizer"],  # step
        ["actor_rollout", "generate"],
        ["ref", "forward"],
        ["critic", "forward"],
        ["critic", "update"],
        ["critic", "optimizer"],
        ["together", "generate"],
    ]


def test_disk_that_is_full_is_a_problem(
    config: Callable[..., RunConfig], monkeypatch: pytest.MonkeyPatch
) -> None:
    run = config({})
    monkeypatch.setattr(available.shutil, "disk_usage", lambda path: Usage(10, 10, 0))
    (problem,) = map(str, check_fit(run).problems)
    assert problem.startswith("training.output_dir=") and "has 0; free some space" in problem


def test_sizes_for_people() -> None:
    assert [format_bytes(n) for n in (0, 3 * 2**19, 5 * 2**29)] == ["0", "1.5 MiB", "2.5 GiB"]
