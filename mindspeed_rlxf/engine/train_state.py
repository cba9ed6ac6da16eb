"""Write a role's training state to a folder, and load it; all ranks in the role take part.

    state_00003.safetensors     trained weights (adapters alone, if there are any) and their Adam
                                states, written by the rank (`weights.role_state`)
    random/rank_00003.json      a rank's random streams
    state.json                  steps taken, layout
    index_00003.json            files and headers the rank wrote, until the driver has merged all
                                ranks' indexes into index.json
    config.json, ...            model side files, for conversion

Any layout can read the tensors; only the writing layout reads its random streams. Learning rates
and other optimizer settings are not stored: the configuration has them.
"""

import json
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch.distributed as dist
from megatron.core.optimizer.optimizer import MegatronOptimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from torch import Tensor

from mindspeed_rlxf import device
from mindspeed_rlxf.engine.adam_state import adam_states, count_steps, init_adam_states
from mindspeed_rlxf.engine.hf_stream import Shard, shards
from mindspeed_rlxf.engine.parallel import ParallelGroups
from mindspeed_rlxf.engine.role_files import (
    RANDOM_FILE,
    STATE,
    WRITER,
    IndexRows,
    load_checked,
    write_files,
)
from mindspeed_rlxf.engine.step_guard import SkippedSteps
from mindspeed_rlxf.weights.chunks import HeldChunk
from mindspeed_rlxf.weights.role_state import (
    BUFFER_BYTES,
    WEIGHT,
    StateReader,
    file_of,
    open_state,
    write_chunks,
)
from mindspeed_rlxf.weights.stage_loader import StageWeights
from mindspeed_rlxf.weights.state_files import Loaded

CONTEXT = "context_parallel_size"
Read = Callable[[Tensor, int, int], Tensor]
"""(tensor, start, stop) -> copy on the host of elements start to stop, flattened."""


@dataclass
class TrainState:
    """The state that training changes on this rank, and how it is saved.

    Between `begin_save` and `end_save`, collectives over the role, a thread writes files from host
    copies while the role works on.
    """

    weights: StageWeights
    groups: ParallelGroups
    optimizer: MegatronOptimizer
    scheduler: OptimizerParamScheduler
    skipped: SkippedSteps
    model_chunks: int  # of a virtual pipeline; 1 without one
    describe: Callable[[Path], list[Path]]  # writes the model's side files into a folder
    read: Read
    saving: tuple[Path, Future[float]] | None = None

    def begin_save(self, folder: Path) -> None:
        """Copy this rank's share to the host, and start writing it into `folder` in a thread.

        A collective. Raises AssertionError if the previous save was not ended.
        """
        assert self.saving is None, "the save before this one has not been ended"
        rank = dist.get_rank()
        texts = {RANDOM_FILE.format(rank): json.dumps(_random_state(self.groups))}
        if rank == 0:
            texts[STATE] = json.dumps(saved_numbers(self), indent=1)
        with self.groups.active():
            chunks = list(_copy_share(self))
        # With `runtime: local` the first rank makes the folder of the checkpoint and removes
        # unfinished ones right before.
        dist.barrier()

        def write() -> tuple[list[Path], IndexRows]:
            file = file_of(folder, rank)
            rows = write_chunks(file, chunks)
            chunks.clear()
            return [file], {file.name: rows}

        writing = WRITER.submit(write_files, folder, rank, write, texts, self.describe)
        self.saving = folder, writing


def load_state(state: TrainState, folder: Path) -> Loaded:
    """Check and load this role's training state from `folder` (`load_checked`).

    Random streams are not loaded if the layout or the device kind has changed: they go on from the
    seed, and the result's `same_layout` is False.
    """
    return load_checked(folder, lambda: _load_share(state, folder))


def _load_share(state: TrainState, folder: Path) -> bool:
    """Load this rank's weights, optimizer, step counts and random streams, without collectives.

    Returns False if random streams were not loaded, because the layout or device kind has changed.
    Raises ValueError if the folder has another model or no state, OSError if it cannot be read; the
    state may then be loaded in part.
    """
    numbers = json.loads((folder / STATE).read_bytes())
    with state.groups.active():
        _load_tensors(state, folder, numbers["optimizer_steps"])
    state.scheduler.num_steps = numbers["scheduler_steps"]
    state.skipped.in_a_row = numbers["skipped_in_a_row"]
    state.scheduler.step(increment=0)  # the rates of the configuration at this step
    # Older checkpoints have no context-parallel size.
    if {CONTEXT: 1} | numbers["layout"] != _layout_numbers(state):
        return False
    streams = json.loads((folder / RANDOM_FILE.format(dist.get_rank())).read_bytes())
    if not device.load_process_state(streams["process"]):
        return False
    megatron = {name: device.from_text(text) for name, text in streams["megatron"].items()}
    state.groups.random_states = megatron
    return True


def _copy_share(state: TrainState) -> Iterator[HeldChunk]:
    """Yield host chunks with the weights, then the optimizer states, written by this rank."""
    by_parameter = {}
    for shard in shards(state.weights, state.groups):
        by_parameter[id(shard.parameter)] = shard
        weights = shard.parameter.detach()
        yield from _copy_range(state.read, WEIGHT, shard, weights, 0, shard.written)
    for adam in adam_states(state.optimizer):
        shard = by_parameter[id(adam.parameter)]
        flat = shard.written
        if adam.start is not None:  # only this rank has the slice
            flat = adam.flat if shard.is_written else range(0)
        for name, tensor in adam.tensors.items():
            yield from _copy_range(state.read, name, shard, tensor, adam.start or 0, flat)


def _copy_range(
    read: Read, state_name: str, shard: Shard, tensor: Tensor, start: int, flat: range
) -> Iterator[HeldChunk]:
    if flat:
        copied = read(tensor, flat.start - start, flat.stop - start)
        yield from shard.held_chunks(state_name, copied, flat)


def _load_tensors(state: TrainState, folder: Path, step: int) -> None:
    """Read this rank's weights and optimizer states from the files in `folder`, in place.

    Makes the optimizer's states first, which count on from `step`. Uses a bounded host buffer.
    Damaged files and another model's raise ValueError (`open_state`, `_read_range`), unreadable
    ones OSError; some tensors may have been read then.
    """
    init_adam_states(state.optimizer, step)
    stage = state.weights
    reader = open_state(folder, stage.architecture, stage.trained_shapes, stage.trust_files)
    by_parameter = {}
    for shard in shards(state.weights, state.groups):
        by_parameter[id(shard.parameter)] = shard
        weights = shard.parameter.detach().view(-1)
        _read_range(reader, WEIGHT, shard, weights, range(weights.numel()))
    for adam in adam_states(state.optimizer):
        shard = by_parameter[id(adam.parameter)]
        for name, tensor in adam.tensors.items():
            _read_range(reader, name, shard, tensor.view(-1), adam.flat)


def _read_range(
    reader: StateReader, state_name: str, shard: Shard, tensor: Tensor, flat: range
) -> None:
    """Read a shard range into `tensor`; vocabulary padding becomes 0.

    Raises ValueError if the folder lacks a tensor, or has it in another dtype.
    """
    stored = reader(state_name)
    num_read = 0
    for target in shard.held_chunks(state_name, tensor, flat):
        if target.name not in stored or stored[target.name].dtype != tensor.dtype:
            raise ValueError(
                f"the checkpoint must have {state_name} of {target.name} in {tensor.dtype}, as "
                "this run has it; set the role's bf16 as in the run that wrote the checkpoint"
            )
        for rows in target.chunk.split(BUFFER_BYTES // tensor.itemsize):
            elements = stored[target.name].read(rows)
            target.tensor[rows.relative_to(target.chunk).slices] = elements
        num_read += target.chunk.numel
    tensor[num_read:].zero_()


def saved_numbers(state: TrainState) -> dict[str, Any]:
    """Return the content for `state.json`: step counts and the layout."""
    return {
        "optimizer_steps": count_steps(state.optimizer),
        "scheduler_steps": state.scheduler.num_steps,
        "skipped_in_a_row": state.skipped.in_a_row,
        "layout": _layout_numbers(state),
    }


def _layout_numbers(state: TrainState) -> dict[str, int]:
    groups = state.groups
    return {
        "world_size": dist.get_world_size(),
        "tensor_model_parallel_size": groups.tp.size(),
        "pipeline_model_parallel_size": groups.pp.size(),
        "expert_model_parallel_size": groups.ep.size(),
        CONTEXT: groups.cp.size(),
        "model_chunks": state.model_chunks,
    }


def _random_state(groups: ParallelGroups) -> dict[str, Any]:
    streams = groups.random_states
    return {
        "process": device.process_state(),
        "megatron": {name: device.to_text(state) for name, state in streams.items()},
    }
