"""A resumed rank continues its random streams and its count of skipped steps."""

import errno
import math
import random
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist
from megatron.core import tensor_parallel

from mindspeed_rlxf.cluster.errors import WorkerError
from mindspeed_rlxf.cluster.group import RoleGroup
from mindspeed_rlxf.config.rank_layout import ParallelLayout
from mindspeed_rlxf.config.schema import OptimizerConfig
from mindspeed_rlxf.data.batch import RoleOutput
from mindspeed_rlxf.engine import role_files, train_state
from mindspeed_rlxf.engine.engine import MegatronEngine
from mindspeed_rlxf.engine.step_guard import SkippedSteps, StepResult
from mindspeed_rlxf.engine.train_engine import TrainEngine
from mindspeed_rlxf.models.parameters import Head
from mindspeed_rlxf.weights import stage_loader, state_files
from mindspeed_rlxf.weights.state_files import Loaded
from tests.distributed.groups import build_group
from tests.distributed.llamas import TIED, make_llama, role_of

MAX_SKIPPED = 2


class Drawer:
    """Draws from every stream of its process, and can be given wrong steps."""

    def __init__(self, folder: Path) -> None:
        role = role_of(folder, TIED)
        skipped = SkippedSteps("skip", MAX_SKIPPED, "actor")
        optimizer = OptimizerConfig(lr=0.01)
        self.engine = MegatronEngine(role, Head.LANGUAGE_MODEL, 1, optimizer, 9, skipped)

    def draw(self, times: int) -> RoleOutput:
        """Report: the last number of each stream; rank r draws r times more."""
        found: dict[str, Any] = {}
        for _ in range(times + dist.get_rank()):
            found = {
                "torch": torch.rand(()).item(),
                "numpy": np.random.standard_normal(),  # made in pairs: one waits in the state
                "python": random.gauss(),  # likewise
                **self._of_megatron(),
            }
        return RoleOutput(report=found)

    def _of_megatron(self) -> dict[str, float]:
        with self.engine.groups.active():
            tracker, found = tensor_parallel.get_cuda_rng_tracker(), {}
            for name in tracker.get_states():
                with tracker.fork(name):
                    found[name] = torch.rand(()).item()
        return found

    def wrong_steps(self, count: int) -> RoleOutput:
        for _ in range(count):
            self.engine.skipped.judge(StepResult(math.nan, ("loss",)), 1, 1)
        return RoleOutput()

    def save_wrongly(self, folder: Path, rank: int) -> RoleOutput:
        """As `export_wrongly`, the files of a checkpoint."""
        write = train_state.write_chunks
        with wrong_on(rank, train_state, "write_chunks", FULL, wraps=write):
            self.engine.begin_save(folder)
            return self._error(self.engine.end_save)

    def export_wrongly(self, folder: Path, rank: int) -> RoleOutput:
        """The disk of the rank is full; report: the error of this rank."""
        with wrong_on(rank, stage_loader, "write_safetensors", FULL):
            return self._error(self.engine.export, folder, None)

    def export_without_the_source(self, folder: Path, rank: int) -> RoleOutput:
        """The rank cannot read the weights that the export is like; report as above."""
        gone = ValueError("a file of the source is gone")
        with wrong_on(rank, stage_loader, "open_weights", gone, return_value={}):
            return self._error(self.engine.export, folder, None)

    def _error(self, method: Any, *arguments: Any) -> RoleOutput:
        with pytest.raises(OSError) as found:
            method(*arguments)
        return RoleOutput(report=str(found.value))

    def load_what_a_rank_cannot_read(self, folder: Path, blind: int) -> RoleOutput:
        """Report: what this rank returns."""
        error, find = OSError(errno.EIO, "Input/output error"), role_files.find_damage
        with (
            wrong_on(blind, role_files, "find_damage", error, wraps=find),
            mock.patch.object(state_files, "PAUSES_S", ()),
        ):
            return RoleOutput(report=self.engine.load_state(folder))


FULL = OSError(errno.ENOSPC, "No space left")


def wrong_on(rank: int, module: Any, name: str, error: Exception, **more: Any) -> Any:
    """A patch of a function, which raises the error on one rank."""
    mine = error if dist.get_rank() == rank else None
    return mock.patch.object(module, name, side_effect=mine, **more)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    make_llama(folder, TIED)
    return folder


def built(runtime: Any, model: Path) -> RoleGroup:
    """Two replicas in new roles."""
    return build_group(runtime, ParallelLayout(2), Drawer, model)


def save(group: RoleGroup, folder: Path) -> None:
    group.call_engine(TrainEngine.begin_save, folder).result()
    group.call_engine(TrainEngine.end_save).result()


def test_every_rank_goes_on_with_its_own_random_streams(warm_runtime, tmp_path, model):
    group = built(warm_runtime, model)
    group.call(Drawer.draw, 3).result()
    save(group, tmp_path / "state")
    following = group.call(Drawer.draw, 1).result()
    group.call(Drawer.draw, 5).result()
    loaded = group.call_engine(TrainEngine.load_state, tmp_path / "state").result()
    assert loaded == [Loaded()] * 2
    assert group.call(Drawer.draw, 1).result() == following
    first, second = following
    assert len(first) == 6 and not set(first.values()) & set(second.values())


def test_a_folder_that_one_rank_cannot_read_is_unreadable_for_all_ranks(
    warm_runtime, tmp_path, model
):
    """It does not count as damaged: the run must not go on from an older one."""
    group = built(warm_runtime, model)
    save(group, tmp_path / "state")
    first, second = group.call(Drawer.load_what_a_rank_cannot_read, tmp_path / "state", 1).result()
    assert first == second and first.unreadable.startswith("[Errno 5]") and not first.problem


def test_wrong_steps_before_a_resume_count_in_those_in_a_row(warm_runtime, tmp_path, model):
    group = built(warm_runtime, model)
    group.call(Drawer.wrong_steps, MAX_SKIPPED).result()
    save(group, tmp_path / "state")
    resumed = built(warm_runtime, model)
    resumed.call_engine(TrainEngine.load_state, tmp_path / "state").result()
    with pytest.raises(WorkerError, match=r"of the 2 steps before, over training\.max_skipped=2"):
        resumed.call(Drawer.wrong_steps, 1).result()


@pytest.mark.parametrize(
    ("method", "full"),
    [(Drawer.save_wrongly, 1), (Drawer.export_wrongly, 0)],  # rank 0 exports alone
    ids=["save", "export"],
)
def test_a_rank_that_cannot_write_is_named_on_all_ranks(
    warm_runtime, tmp_path, model, method, full
):
    folder = tmp_path / "state"
    said = built(warm_runtime, model).call(method, folder, full).result()
    assert said == [f"{folder}: rank {full}: OSError: [Errno 28] No space left"] * 2


def test_a_rank_that_cannot_export_takes_part_in_the_collectives_of_the_others(
    warm_runtime, tmp_path, model
):
    """Two tensor-parallel ranks gather each weight; the report is that of the first one."""
    group = build_group(warm_runtime, ParallelLayout(2, 2), Drawer, model)
    (said,) = group.call(Drawer.export_without_the_source, tmp_path / "out", 0).result()
    assert f"{tmp_path / 'out'}: rank 0: ValueError: a file of the source is gone" in said
