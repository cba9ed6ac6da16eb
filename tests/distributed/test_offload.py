"""Runs with offloaded roles equal runs without, bit by bit, and free the memory meanwhile."""

import gc
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch.distributed as dist
from torch import Tensor

from mindspeed_rlxf.cluster.group import RoleGroup
from mindspeed_rlxf.config.enums import Role
from mindspeed_rlxf.config.roles import OffloadConfig
from mindspeed_rlxf.config.schema import OptimizerConfig
from mindspeed_rlxf.data.batch import Experience, RoleOutput, Rollouts
from mindspeed_rlxf.engine import offload
from mindspeed_rlxf.engine.step_guard import GuardedOptimizer
from mindspeed_rlxf.roles.actor import ActorRole
from mindspeed_rlxf.weights.state_files import entry_of
from tests.chaos.same_run import differences
from tests.distributed.groups import build_group, split_evenly, update
from tests.distributed.llamas import PLAIN, make_models, make_pair, run_config
from tests.distributed.resume_run import start
from tests.distributed.samples import make_experience, make_rollouts
from tests.distributed.test_layout_invariance import ARCHITECTURES, EP2, PP2, SHARDED, SP2
from tests.distributed.test_memory_plan import measured
from tests.distributed.test_resume import OneDriver
from tests.golden import runs

ALL = {"offload": OffloadConfig(weights=True, optimizer=True)}
WEIGHTS = {"offload": OffloadConfig(weights=True)}
OFFLOADED = {"actor_rollout": ALL, "critic": ALL, "ref": WEIGHTS, "reward": WEIGHTS}
KEYS = {"training.offload.weights": True, "training.offload.optimizer": True}
OVERLAP = {"overlap_grad_reduce": True, "overlap_param_gather": True}
OVERLAPPED = {"optimizer": {**SHARDED["optimizer"], **OVERLAP}}
BF16 = {"bf16": True}
# name -> (golden run, keys)
GOLDEN: dict[str, tuple[str, dict[str, Any]]] = {
    "grpo": ("grpo", {"training.bf16": True}),
    "full kl": ("gae_full_kl", {}),
    "weights alone": ("gae", {"training.offload.optimizer": False}),
    "optimizer alone": ("gae", {"training.offload.weights": False, "training.bf16": True}),
}


@pytest.mark.long
@pytest.mark.parametrize("name", GOLDEN)
def test_an_offloaded_run_has_the_metrics_of_another(warm_runtime, tmp_path, name):
    run, keys = GOLDEN[name]
    keys = {"training.train_iters": 3, **keys}
    plain = {key: value for key, value in keys.items() if "offload" not in key}
    expected = runs.run(run, tmp_path / "plain", warm_runtime, plain)
    assert runs.run(run, tmp_path / "moved", warm_runtime, {**KEYS, **keys}) == expected


# name -> (architecture, ranks, keys of every role, sections)
LAYOUTS: dict[str, tuple[str, int, dict[str, Any], dict[str, Any]]] = {
    "dp2 bf16 distributed": ("untied", 2, BF16, SHARDED),
    "dp2 overlapped": ("untied", 2, BF16, OVERLAPPED),
    "fp32": ("tied", 1, {}, {}),
    "pp2": ("untied", 2, PP2, {}),
    "tp2 sequence parallel bf16": ("qwen3", 2, {**SP2, **BF16}, {}),
    "ep2 distributed": ("qwen3-moe", 2, EP2, SHARDED),
}


@pytest.mark.long
@pytest.mark.parametrize("name", LAYOUTS)
def test_an_offloaded_run_that_is_resumed_ends_at_the_same_state(warm_runtime, tmp_path, name):
    """Weights, moments, random streams, metrics and samples; without offload from one part on."""
    architecture, ranks, layout, sections = LAYOUTS[name]
    models = make_models(tmp_path / "models", ARCHITECTURES[architecture])
    how = {"architecture": architecture, "ranks": ranks, "layout": layout, "train_iters": 2}
    run = partial(start, OneDriver(warm_runtime), models, **how)
    moved = {**OFFLOADED, **sections}
    whole = run(tmp_path / "whole", sections=sections, keep_last=9)
    cut = tmp_path / "cut"
    run(cut, sections=moved, killed_in=2)
    resumed = run(cut, sections=moved)
    assert differences(resumed, whole, 2) == []


class Weighed(ActorRole):
    """An actor that reports what is in memory."""

    def weigh(self) -> RoleOutput:
        """Report bytes of all tensors of the process with the parts on the device and without."""
        self.engine.offload()  # allocates the copies on the host
        self.engine.onload()
        there = alive()
        parts = measured(self.engine)[dist.get_rank()]  # type: ignore[arg-type]
        self.engine.offload()
        return RoleOutput(report=[there - alive(), *parts])

    def fail(self, rollouts: Rollouts, experience: Experience, folder: str) -> RoleOutput:
        """Fail between forward and step; report what was saved before, after, and after another
        engine needed the device, and whether a step succeeds then."""
        saved = [self._save(Path(folder) / "before")]
        steps = [list(range(rollouts.num_rows))]
        failing = mock.patch.object(GuardedOptimizer, "step", side_effect=RuntimeError("midway"))
        with failing, pytest.raises(RuntimeError, match="midway"):
            self.update_policy(rollouts, experience, steps)
        saved.append(self._save(Path(folder) / "after"))
        with offload.holding():
            saved.append(self._save(Path(folder) / "away"))
        norm = self.update_policy(rollouts, experience, steps).report.steps[0]["grad_norm"]
        return RoleOutput(report=[*saved, norm])

    def probe(self, rollouts: Rollouts, folder: str) -> RoleOutput:
        """Resume, then probe the weights while a server needs the device; report the names of the
        tensors that are sent unchanged in the probe, and of those that are others after it."""
        self._save(Path(folder))
        self.engine.load_state(Path(folder))
        before = self._copies()
        self.begin_probe(rollouts)
        probed = self._copies()
        with offload.holding():
            pass
        self.end_probe()
        with offload.holding():
            pass
        after = self._copies()
        sent_unchanged = [name for name in before if before[name].equal(probed[name])]
        lost = [name for name in before if not before[name].equal(after[name])]
        return RoleOutput(report=(sent_unchanged, lost))

    def _copies(self) -> dict[str, Tensor]:
        return {name: tensor.clone() for name, tensor in self.engine.hf_tensors()}

    def _save(self, folder: Path) -> list[str]:
        self.engine.begin_save(folder)
        self.engine.end_save()
        return [entry_of(folder, file)["sha256"] for file in sorted(folder.glob("state_*"))]


def alive() -> int:
    """Bytes of the storages of all tensors."""
    gc.collect()
    tensors = (each for each in gc.get_objects() if issubclass(type(each), Tensor))
    found = [tensor.untyped_storage() for tensor in tensors]
    return sum({storage._cdata: storage.nbytes() for storage in found}.values())


@pytest.fixture
def actor(warm_runtime: Any, tmp_path: Path) -> RoleGroup:
    """Two replicas in bf16 with a distributed optimizer, after a step."""
    lm, scored = make_pair(tmp_path, PLAIN)
    optimizer = OptimizerConfig(lr=1e-3, use_distributed_optimizer=True)
    config = run_config(lm, scored, PLAIN, BF16, 2, optimizer, **OFFLOADED)
    group = build_group(warm_runtime, config.layout(Role.ACTOR_ROLLOUT), Weighed, config)
    rollouts = make_rollouts()
    update(group, ActorRole.update_policy, rollouts, make_experience(rollouts))
    return group


def test_the_memory_of_all_parts_is_gone(actor: RoleGroup) -> None:
    for freed, *parts in actor.call(Weighed.weigh).result():
        assert all(parts) and 0 <= sum(parts) - freed < 512  # the counts of steps stay


def test_a_step_that_fails_leaves_a_state_that_can_be_saved(actor, tmp_path):
    rollouts = make_rollouts()
    given = split_evenly(rollouts, 2), split_evenly(make_experience(rollouts), 2)
    before, after, away, norm = actor.call(Weighed.fail, *given, str(tmp_path)).result()[0]
    assert len(before) == 2 and before == after == away
    assert norm > 0


def test_a_probe_after_a_resume_leaves_the_weights_as_they_were(actor, tmp_path):
    """While the server has the device the probe's weights are on the host."""
    for report in actor.call(Weighed.probe, make_rollouts(), str(tmp_path)).result():
        assert report == ([], [])
