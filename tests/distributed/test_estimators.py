"""Five iterations of each estimator without a critic, on fixed responses, in two layouts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from mindspeed_rlxf.config.enums import (
    AdvantageWhiten,
    AdvEstimator,
    KlIn,
    KlPenalty,
    PolicyLoss,
    Role,
    Stage,
)
from mindspeed_rlxf.config.schema import RunConfig
from mindspeed_rlxf.run.directory import RunDirectory
from tests.distributed.llamas import TIED, make_models
from tests.distributed.test_layout_invariance import (
    ITERATIONS,
    PP2,
    TP2,
    compare_metrics,
    distance,
    fixed_run,
    load_folder,
)
from tests.training import train
from tests.trl.runs import metrics_of

LOSS = {"kl_in": KlIn.LOSS, "kl_penalty": KlPenalty.LOW_VAR_KL}
PLAIN = {"advantage_whiten": AdvantageWhiten.NONE}
# name -> estimator, keys of the algorithm, keys of the actor, processes and keys of the layout
CASES: dict[str, tuple[AdvEstimator, dict[str, Any], dict[str, Any], int, dict[str, Any]]] = {
    "grpo": (AdvEstimator.GRPO, {**LOSS, **PLAIN}, {}, 2, {}),
    "dr_grpo": (AdvEstimator.DR_GRPO, PLAIN, {"clip_ratio_high": 0.28}, 4, {**TP2, **PP2}),
    "rloo": (AdvEstimator.RLOO, PLAIN, {"policy_loss": PolicyLoss.GSPO}, 2, TP2),
    "reinforce++": (
        AdvEstimator.REINFORCE_PLUS_PLUS,
        {"gamma": 0.99, "whiten_rewards": True},
        {"entropy_coeff": 0.01},
        2,
        {},
    ),
    "reinforce++ baseline": (
        AdvEstimator.REINFORCE_PLUS_PLUS_BASELINE,
        {**LOSS, "reward_clip": 0.5},
        {},
        2,
        PP2,
    ),
    "remax": (AdvEstimator.REMAX, PLAIN, {}, 2, {}),
}
SHORT = ("grpo", "reinforce++ baseline")


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_models(tmp_path_factory.mktemp("tied"), TIED)


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=() if name in SHORT else pytest.mark.long) for name in CASES],
)
def test_layouts_learn_the_same_without_a_critic(
    warm_runtime: Any, tmp_path: Path, models: Path, name: str
) -> None:
    estimator, algorithm, actor, size, layout = CASES[name]
    sections = {
        "training": {"stage": Stage.RAY_GRPO, "global_batch_size": 4},
        "algorithm": {"adv_estimator": estimator, **algorithm},
        "actor_rollout": {"n_samples_per_prompt": 4, **actor},
    }
    compare(warm_runtime, tmp_path, models, sections, size, layout)


def test_layouts_prefer_the_same(warm_runtime: Any, tmp_path: Path, models: Path) -> None:
    sections = {
        "training": {"stage": Stage.RAY_ONLINE_DPO, "global_batch_size": 8},
        "actor_rollout": {"n_samples_per_prompt": 2},
    }
    compare(warm_runtime, tmp_path, models, sections, 2, {})


def compare(
    runtime: Any,
    out: Path,
    models: Path,
    sections: dict[str, dict[str, Any]],
    size: int,
    layout: dict[str, Any],
) -> None:
    one = outcome(runtime, models, out / "one", sections, 1, {})
    other = outcome(runtime, models, out / "other", sections, size, layout)
    before = load_folder(models / "lm")
    moved = distance(one[1], before)
    assert moved > 1e-3 * distance(before, {k: 0 * v for k, v in before.items()})
    assert distance(other[1], one[1]) < 1e-4 * moved
    compare_metrics(one[0], other[0])


def outcome(
    runtime: Any,
    models: Path,
    out: Path,
    sections: dict[str, dict[str, Any]],
    size: int,
    layout: dict[str, Any],
) -> tuple[list[dict[str, float]], dict[str, Any]]:
    """Metrics of every iteration and the final weights."""
    config, prepared = fixed_run(models, out, TIED, size, layout, sections)
    config = without_critic(config)
    directory = RunDirectory.create(config)
    train(config, prepared, directory, runtime)
    metrics = metrics_of(directory)
    assert len(metrics) == ITERATIONS
    assert not any(name.startswith("critic/v") for name in metrics[0])
    assert not (directory.path / "final" / "critic_hf").exists()
    return metrics, load_folder(directory.path / "final" / "actor_hf")


def without_critic(config: RunConfig) -> RunConfig:
    placement = {role: pool for role, pool in config.placement.items() if role is not Role.CRITIC}
    return config.model_copy(update={"critic": None, "placement": placement})
