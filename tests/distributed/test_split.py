"""A rollout on ranks of its own gives the same samples and metrics, and its faults are reported."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from mindspeed_rlxf.checkpoint.directory import RunDirectory
from mindspeed_rlxf.config.enums import Role
from mindspeed_rlxf.config.schema import RunConfig
from mindspeed_rlxf.trainer.preflight import Prepared
from tests.distributed.llamas import SHARES_GROUPS
from tests.distributed.test_layout_invariance import (
    ARCHITECTURES,
    EP2,
    PP2,
    SP2,
    TP2,
    VP2,
    Outcome,
    compare,
    fixed_run,
    models,
)
from tests.processes import read_lines
from tests.training import run

__all__ = ["models"]

# name -> architecture, ranks that train and that generate, training's layout, rollout's TP and EP
SPLITS: dict[str, tuple[Any, ...]] = {
    "tp2 -> dp2": ("qwen3", (2, 2), TP2, 1),
    "pp2 -> dp2": ("qwen3", (2, 2), PP2, 1),
    "dp2 -> tp2": ("tied", (2, 2), {}, 2),
    "dp2 ep2 -> dp2": ("qwen3-moe", (2, 2), EP2, 1),
    "dp2 -> dp2 ep2": ("qwen3-moe", (2, 2), {}, 1, 2),
    "tp2 -> tp2": ("qwen2", (2, 2), TP2, 2),
    "virtual pipeline -> tp2": ("tied, 4 layers", (2, 2), VP2, 2),
    "tp2 pp2 -> tp2": ("tied", (4, 2), {**TP2, **PP2}, 2),
    "tp2 dp2 ep2 -> dp2": ("mixtral", (4, 2), {**SP2, **EP2}, 1),
}
if SHARES_GROUPS:
    SPLITS["dp2 -> tp2, one group"] = ("qwen3, one group", (2, 2), {}, 2)
    SPLITS["tp2, one group -> dp2"] = ("qwen3, one group", (2, 2), TP2, 1)
USUAL = ("tp2 -> dp2",)


def run_of(
    folder: Path, out: Path, name: str, parts: tuple[int, int] | None = None,
    layout: dict[str, Any] | None = None, rollout_tp: int | None = None,
    rollout_ep: int | None = None,
) -> tuple[RunConfig, Prepared]:  # fmt: skip
    """Iterations on responses that are sampled. parts: None = one rank, all roles."""
    keys = {**(layout or {})}
    if parts:
        keys |= {"num_gpus_for_train": parts[0], "num_gpus_for_infer": parts[1]}
    sections = {"actor_rollout": keys}
    config, prepared = fixed_run(folder, out, ARCHITECTURES[name], 1, {}, sections)
    everything = config.logging.model_copy(update={"samples": "all"})
    config = config.model_copy(update={"logging": everything})
    if parts:
        actor = Role.ACTOR_ROLLOUT
        sizes = {"tensor_model_parallel_size": rollout_tp, "expert_model_parallel_size": rollout_ep}
        changes = {
            "placement": {**config.placement, actor: "actor"},
            "resource_pool": {"main": [1], "actor": [sum(parts)]},
            "rollout": config.rollout.model_copy(update=sizes),
        }
        config = config.model_copy(update=changes)
    return config, replace(prepared, fixed_responses=None)


_shared: dict[str, tuple[Outcome, list[Any]]] = {}


def outcome(runtime: Any, folder: Path, out: Path, *case: Any) -> tuple[Outcome, list[Any]]:
    """What came of a run, and its samples."""
    config, prepared = run_of(folder, out, *case)
    directory = run(config, runtime, prepared)
    lines = read_lines(directory.samples)
    (file,) = directory.samples_tokens.iterdir()
    for sample, tokens in zip(lines, read_lines(file), strict=True):
        assert tokens["sample_id"] == sample["sample_id"]
        counts = {len(tokens[name]) for name in ("advantage", "kl", "value")}
        assert counts == {len(sample["response_ids"])}
    assert all(s["weights_version"] == [s["iteration"] - 1] * 2 for s in lines)
    return Outcome(directory), [(s["iteration"], s["sample_id"], s["response_ids"]) for s in lines]


@pytest.mark.parametrize(
    "split",
    [pytest.param(name, marks=() if name in USUAL else pytest.mark.long) for name in SPLITS],
)
def test_samples_and_metrics_are_those_of_ranks_that_do_both(warm_runtime, tmp_path, models, split):
    name, *case = SPLITS[split]
    if name not in _shared:
        _shared[name] = outcome(warm_runtime, models[name], tmp_path / "shared", name)
    one, samples = _shared[name]
    other, others = outcome(warm_runtime, models[name], tmp_path / "split", name, *case)
    assert samples == others
    assert len({tuple(ids) for _, _, ids in samples}) > len(samples) // 2
    compare(one, other, models[name])
    assert abs(one.metrics[0]["critic/kl"]) <= 1e-5, "the policy starts as the reference"
    assert all(line["timing/sync"] > 0 for line in other.metrics)
    train, infer = case[0]
    assert ranks_in_timeline(tmp_path / "split", "actor_rollout.update_policy") == {*range(train)}
    assert ranks_in_timeline(tmp_path / "split", "rollout.advance") == {
        *range(train, train + infer)
    }


def ranks_in_timeline(run: Path, what: str) -> set[int]:
    """Of the actor's pool."""
    (file,) = RunDirectory(run).timeline.iterdir()
    events = json.loads(file.read_text())
    return {event["args"]["rank"] for event in events if event["name"] == what}
