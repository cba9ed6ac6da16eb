"""Generation ahead of training: one process and ranks of its own give the same bits."""

from __future__ import annotations

import hashlib
import shutil
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

from mindspeed_rlxf.checkpoint.directory import RunDirectory
from mindspeed_rlxf.config.compose import compose
from mindspeed_rlxf.config.load import resolve
from mindspeed_rlxf.config.schema import RunConfig
from mindspeed_rlxf.trainer.ppo import Iteration, PpoTrainer
from tests import training
from tests.chaos.same_run import lines_of
from tests.distributed.cluster.test_local_runtime import torchrun
from tests.distributed.resume_run import flip
from tests.golden.runs import GROUPS, PPO, SMALL
from tests.processes import run_python

ITERATIONS = 6
# Slices of two tokens and few rows at once: responses, of one to eight tokens, go on over several
# slices, and over changes of the weights.
AHEAD = {
    "actor_rollout.num_samples_per_step": 7,
    "rollout.slice_steps": 2,
    "training.train_iters": ITERATIONS,
    "logging.samples": "all",
}
FEW = {"training.global_batch_size": 16, "actor_rollout.ppo_mini_batch_size": 16}
PAIRS = {"training.global_batch_size": 16, "actor_rollout.ppo_mini_batch_size": 16}
SETTINGS: dict[str, tuple[str, dict[str, Any]]] = {
    "ppo": (
        "ppo_trainer_tiny",
        {
            **PPO,
            **FEW,
            "actor_rollout.micro_batch_size": 8,
            "critic.critic_mini_batch_size": 16,
            "critic.micro_batch_size": 8,
        },
    ),
    "grpo": ("grpo_trainer_tiny", {**GROUPS, "training.global_batch_size": 8}),
    "remax": (
        "grpo_trainer_tiny",
        {**GROUPS, "training.global_batch_size": 8, "algorithm.adv_estimator": "remax"},
    ),
    "filter_groups": (
        "grpo_trainer_tiny",
        {**GROUPS, "training.global_batch_size": 8, "algorithm.filter_groups": True},
    ),
    "online_dpo": ("online_dpo_trainer_tiny", PAIRS),
}
APART = {
    "placement.actor_rollout": "actor",
    "+resource_pool.actor": 2,
    "actor_rollout.num_gpus_for_train": 1,
    "actor_rollout.num_gpus_for_infer": 1,
}

TWO_APART = {
    **APART,
    "resource_pool.main": 2,
    "+resource_pool.actor": 4,
    "actor_rollout.num_gpus_for_train": 2,
    "actor_rollout.num_gpus_for_infer": 2,
}


@dataclass
class Outcome:
    """What a run has computed."""

    samples: list[dict[str, Any]]
    metrics: list[dict[str, Any]]
    consumed: list[dict[str, Any]]
    weights: str

    @property
    def ages(self) -> set[int]:
        """Updates between the oldest token of each sample and its training."""
        return {s["iteration"] - 1 - s["weights_version"][0] for s in self.samples}


def make_config(name: str, out: Path, more: dict[str, Any]) -> RunConfig:
    base, changes = SETTINGS[name]
    keys = {**SMALL, **changes, **AHEAD, **more, "training.output_dir": out}
    return resolve(compose(base, [f"{key}={value}" for key, value in keys.items()]), name)


def outcome_of(directory: RunDirectory) -> Outcome:
    metrics = lines_of(directory.metrics)
    weights = hashlib.sha256()
    for file in sorted((directory.path / "final").rglob("*.safetensors")):
        weights.update(file.read_bytes())
    return Outcome(
        lines_of(directory.samples), metrics, lines_of(directory.consumed), weights.hexdigest()
    )


def run(name: str, out: Path, runtime: Any, **more: Any) -> Outcome:
    return outcome_of(training.run(make_config(name, out, more), runtime))


def assert_same(one: Outcome, other: Outcome) -> None:
    assert one.samples == other.samples
    assert one.metrics == other.metrics
    assert one.consumed == other.consumed
    assert one.weights == other.weights


LONG = pytest.mark.long
CASES = [
    pytest.param(name, staleness, marks=() if (name, staleness) in SHORT else LONG)
    for SHORT in [(("ppo", 3), ("filter_groups", 3))]
    for name in SETTINGS
    for staleness in (1, 3)
]


@pytest.mark.parametrize(("name", "staleness"), CASES)
def test_ranks_that_generate_beside_training_give_the_run_of_one_process(
    warm_runtime: Any, tmp_path: Path, name: str, staleness: int
) -> None:
    ahead = {"rollout.max_staleness": staleness}
    one = run(name, tmp_path / "one", warm_runtime, **ahead, **{"rollout.lead": 1})
    other = run(name, tmp_path / "other", warm_runtime, **ahead, **APART)
    assert_same(one, other)
    assert max(one.ages) >= min(staleness, 2) and max(one.ages) <= staleness
    ids = [i for line in one.consumed for i in line["prompts"]]
    assert len(ids) == len(set(ids))
    mixed = [s for s in one.samples if s["weights_version"][0] < s["weights_version"][1]]
    assert bool(mixed) == (staleness > 1), "responses go on over a change of weights"


@LONG
@pytest.mark.parametrize("name", ["ppo", "filter_groups"])
def test_two_ranks_of_each_kind_give_the_run_of_two_that_do_both(
    warm_runtime: Any, tmp_path: Path, name: str
) -> None:
    """Each sample is generated on the replica that its id says, in both."""
    ahead = {"rollout.max_staleness": 3}
    both = {"resource_pool.main": 2, "rollout.lead": 1}
    one = run(name, tmp_path / "one", warm_runtime, **ahead, **both)
    assert_same(run(name, tmp_path / "other", warm_runtime, **ahead, **TWO_APART), one)


def run_command(name: str, out: Path, launcher: list[str], **more: Any) -> Outcome:
    """Run the training command on processes of its own. launcher: words of torchrun"""
    base, changes = SETTINGS[name]
    keys = {**SMALL, **changes, **AHEAD, **more, "training.output_dir": out}
    words = [f"{key}={value}" for key, value in keys.items()]
    run_python(*launcher, "ray_gpt.py", "--config-name", base, *words, timeout_s=900)
    return outcome_of(RunDirectory(out))


@LONG
@pytest.mark.parametrize("name", ["ppo", "filter_groups"])
def test_two_ranks_of_torchrun_give_the_run_of_two_actors_of_each_kind_on_ray(
    tmp_path: Path, name: str
) -> None:
    on_torchrun = {"runtime": "local", "resource_pool.main": 2, "rollout.lead": 1}
    on_ray = {**TWO_APART, "runtime.address": "local"}
    staleness = {"rollout.max_staleness": 3}
    one = run_command(name, tmp_path / "one", torchrun(), **staleness, **on_torchrun)
    other = run_command(name, tmp_path / "other", [], **staleness, **on_ray)
    assert_same(one, other)
    assert max(one.ages) > 1


LATE = """
import random
import time

from mindspeed_rlxf.config.enums import Role
from mindspeed_rlxf.roles.actor import ActorRole
from mindspeed_rlxf.roles.own_roles import register_role
from mindspeed_rlxf.roles.reference import ReferenceRole
from mindspeed_rlxf.roles.rollout import RolloutRole


def late(method):
    def call(*arguments, **named):
        time.sleep(random.SystemRandom().uniform(0.0, 0.3))
        return method(*arguments, **named)

    call.__name__ = method.__name__
    return call


def register_late(role, ours, *methods):
    later = {name: late(getattr(ours, name)) for name in methods}
    register_role(role)(type("Late", (ours,), later))


register_late(Role.ACTOR_ROLLOUT, ActorRole, "log_probs", "update_policy", "send_weights")
register_late(Role.REF, ReferenceRole, "log_probs")
register_late(Role.ROLLOUT, RolloutRole, "add", "advance", "take", "withdraw", "update_weights")
"""
SCORE = """
import random
import time


def score(response, ground_truth, **_):
    time.sleep(random.SystemRandom().uniform(0.0, {longest_s}))
    return float(response == ground_truth)
"""


@LONG
@pytest.mark.usefixtures("registries")
def test_random_delays_of_roles_and_scores_change_nothing(
    warm_runtime: Any, tmp_path: Path
) -> None:
    """With `filter_groups` scores decide what is drawn."""
    outcomes = []
    for longest_s in (0.0, 0.2):
        folder = tmp_path / f"up_to_{longest_s}_s"
        folder.mkdir()
        (folder / "late.py").write_text(LATE if longest_s else "")
        (folder / "score.py").write_text(SCORE.format(longest_s=longest_s))
        keys = {
            "rollout.max_staleness": 3,
            "training.plugins": f"[{folder / 'late.py'}]",
            "+reward.functions": f"[{folder / 'score.py'}:score]",
            **APART,
        }
        outcomes.append(run("filter_groups", folder / "run", warm_runtime, **keys))
    assert_same(*outcomes)
    assert max(outcomes[0].ages) > 1


class Killed(Exception):
    """Ends a run in the middle, as a kill would."""


def run_with_kills(
    name: str, out: Path, runtime: Any, killed_in: list[int], **more: Any
) -> Outcome:
    """Run, die in each of these iterations after the updates, start again, and finish."""
    hooks = PpoTrainer._run_hooks
    for iteration in [*killed_in, None]:

        def killed(
            trainer: PpoTrainer, finished: Iteration, iteration: int | None = iteration
        ) -> None:
            if trainer.iteration == iteration:
                raise Killed
            hooks(trainer, finished)

        with patch.object(PpoTrainer, "_run_hooks", killed), suppress(Killed):
            result = run(name, out, runtime, **more)
    return result


@pytest.mark.parametrize(
    ("name", "keys"),
    [
        ("filter_groups", {"rollout.lead": 1}),
        pytest.param("ppo", APART, marks=LONG),
        pytest.param("ppo", {}, marks=LONG),
        pytest.param("remax", APART, marks=LONG),
        pytest.param("online_dpo", APART, marks=LONG),
    ],
)
def test_a_run_that_generates_ahead_resumes_as_the_unfailed_one(
    warm_runtime: Any, tmp_path: Path, name: str, keys: dict[str, Any]
) -> None:
    keys = {"rollout.max_staleness": 3, "training.save_interval": 1, **keys}
    whole = run(name, tmp_path / "whole", warm_runtime, **keys)
    assert_same(run_with_kills(name, tmp_path / "cut", warm_runtime, [1, 3, 4], **keys), whole)
    assert any(s["weights_version"][0] < s["weights_version"][1] for s in whole.samples)


@pytest.mark.parametrize("loss", ["removed", pytest.param("changed", marks=LONG)])
def test_without_what_was_saved_ahead_every_sample_is_trained_once(
    warm_runtime: Any, tmp_path: Path, loss: str
) -> None:
    keys = {"rollout.max_staleness": 3, "training.save_interval": 1, "rollout.lead": 1}
    hooks = PpoTrainer._run_hooks

    def killed(trainer: PpoTrainer, finished: Iteration) -> None:
        if trainer.iteration == 4:
            raise Killed
        hooks(trainer, finished)

    with patch.object(PpoTrainer, "_run_hooks", killed), suppress(Killed):
        run("grpo", tmp_path / "run", warm_runtime, **keys)
    ahead = tmp_path / "run" / "checkpoints" / "iter_0000003" / "ahead"
    if loss == "removed":
        shutil.rmtree(ahead)
    else:
        flip(next(ahead.glob("*.safetensors")), offset=300)
    found = run("grpo", tmp_path / "run", warm_runtime, **keys)
    assert [s["sample_id"] for s in found.samples] == list(range(8 * 4 * ITERATIONS))
    assert [line["first_sample_id"] for line in found.consumed] == list(range(0, 192, 32))
    assert max(found.ages) <= 3
