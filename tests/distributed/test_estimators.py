"""Iterations of each estimator on fixed responses, in two layouts."""

from pathlib import Path
from typing import Any

import pytest

from mindspeed_rlxf.config.enums import AdvantageWhiten, AdvEstimator, KlPenalty, Role, Stage
from mindspeed_rlxf.config.schema import RunConfig
from tests.distributed.llamas import TIED, make_models
from tests.distributed.test_layout_invariance import PP2, TP2, Outcome, compare, fixed_run
from tests.training import run

LOSS = {"kl_in": "loss", "kl_penalty": KlPenalty.LOW_VAR_KL}
PLAIN = {"advantage_whiten": AdvantageWhiten.NONE}
# name -> estimator, keys of the algorithm, keys of the actor, processes and keys of the layout
CASES: dict[str, tuple[AdvEstimator, dict[str, Any], dict[str, Any], int, dict[str, Any]]] = {
    "grpo": (AdvEstimator.GRPO, {**LOSS, **PLAIN}, {}, 2, {}),
    "dr_grpo": (AdvEstimator.DR_GRPO, PLAIN, {"clip_ratio_high": 0.28}, 4, {**TP2, **PP2}),
    "rloo": (AdvEstimator.RLOO, PLAIN, {"policy_loss": "gspo"}, 2, TP2),
    "reinforce++": (
        AdvEstimator.REINFORCE_PLUS_PLUS, {"gamma": 0.99, "whiten_rewards": True},
        {"entropy_coeff": 0.01}, 2, {},
    ),
    "reinforce++ in mini-batches": (
        AdvEstimator.REINFORCE_PLUS_PLUS,
        {"gamma": 0.99, "advantage_whiten": AdvantageWhiten.MINIBATCH}, {}, 2, {},
    ),
    "reinforce++ baseline": (
        AdvEstimator.REINFORCE_PLUS_PLUS_BASELINE, {**LOSS, "reward_clip": 0.5}, {}, 2, PP2,
    ),
    "remax": (AdvEstimator.REMAX, PLAIN, {}, 2, {}),
}  # fmt: skip
SHORT = ("grpo",)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_models(tmp_path_factory.mktemp("tied"), TIED)


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in SHORT else pytest.mark.long) for name in CASES]
)
def test_layouts_learn_the_same_without_a_critic(warm_runtime, tmp_path, models, name):
    estimator, algorithm, actor, size, layout = CASES[name]
    sections = {
        "training": {"stage": Stage.RAY_GRPO, "global_batch_size": 4},
        "algorithm": {"adv_estimator": estimator, **algorithm},
        "actor_rollout": {"n_samples_per_prompt": 4, **actor},
    }
    outcomes = both(warm_runtime, tmp_path, models, sections, size, layout, ["actor"])
    assert not any(name.startswith("critic/v") for name in outcomes[0].metrics[0])


@pytest.mark.long
def test_layouts_prefer_the_same(warm_runtime: Any, tmp_path: Path, models: Path) -> None:
    sections = {
        "training": {"stage": Stage.RAY_ONLINE_DPO, "global_batch_size": 8},
        "actor_rollout": {"n_samples_per_prompt": 2},
    }
    both(warm_runtime, tmp_path, models, sections, 2, {}, ["actor"])


@pytest.mark.long
@pytest.mark.parametrize(("size", "layout"), [(2, {}), (4, TP2)], ids=["dp2", "tp2 dp2"])
def test_layouts_learn_the_same_with_a_warm_up_and_lambdas_of_their_own(
    warm_runtime: Any, tmp_path: Path, models: Path, size: int, layout: dict[str, Any]
) -> None:
    sections = {
        "critic": {"warmup_iters": 2},
        "algorithm": {"critic_lam": 1.0, "lam_alpha": 0.2},  # lambda from 0 to 0.69
    }
    outcomes = both(warm_runtime, tmp_path, models, sections, size, layout, ["actor", "critic"])
    for ours, theirs in zip(*(outcome.metrics[2:] for outcome in outcomes), strict=True):
        expected = pytest.approx(theirs["actor/pg_loss"], rel=1e-4, abs=1e-6)
        assert ours["actor/pg_loss"] == expected


def both(
    runtime: Any, out: Path, models: Path, sections: dict[str, dict[str, Any]], size: int,
    layout: dict[str, Any], roles: list[str],
) -> list[Outcome]:  # fmt: skip
    """What one process and a layout end with, which is alike. roles: that learn"""
    outcomes = []
    for name, ranks, keys in (("one", 1, {}), ("other", size, layout)):
        config, prepared = fixed_run(models, out / name, TIED, ranks, keys, sections)
        if "critic" not in roles:
            config = without_critic(config)
        outcomes.append(Outcome(run(config, runtime, prepared)))
    compare(*outcomes, models, roles=roles)
    return outcomes


def without_critic(config: RunConfig) -> RunConfig:
    placement = {role: pool for role, pool in config.placement.items() if role is not Role.CRITIC}
    return config.model_copy(update={"critic": None, "placement": placement})
