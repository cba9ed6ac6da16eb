"""What a trained role has to remember, written to and read from a folder by all its ranks.

    state_00003.safetensors     weights and Adam's slots that the rank writes (`weights.role_state`)
    random/rank_00003.json      random streams of a rank
    state.json                  steps taken, layout
    config.json, ...            what describes the model to who converts it, and the tokenizer

Tensors can be read in any layout, random streams only in that which wrote them. Learning rates and
other settings of the optimizer are not here: the configuration has them.
"""

from __future__ import annotations

import json
import shutil
import socket
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import torch.distributed as dist
from torch import Tensor

from mindspeed_rlxf.device import random_states
from mindspeed_rlxf.engine.hf_shards import Shard, shards
from mindspeed_rlxf.engine.slots import held_slots, make_slots, step_of
from mindspeed_rlxf.files.plain import read_json
from mindspeed_rlxf.files.safe import sync_folder
from mindspeed_rlxf.weights.role_state import (
    BUFFER_BYTES,
    WEIGHT,
    Piece,
    StateReader,
    file_of,
    write_pieces,
)
from mindspeed_rlxf.weights.sharded_state import open_state
from mindspeed_rlxf.weights.state_files import (
    HOST,
    Written,
    entry_of,
    write_text,
)

if TYPE_CHECKING:
    from mindspeed_rlxf.engine.engine import MegatronEngine

STATE = "state.json"
RANDOM = "random"
T = TypeVar("T")


@dataclass(frozen=True)
class _Share:
    """What a rank writes, on the host. texts: path within the folder -> contents"""

    rank: int
    pieces: list[Piece]
    texts: dict[str, str]


class StateSaver:
    """Writes the role's part of a checkpoint, from copies on the host.

    Between `begin` and `end` files are written in a thread while the role works on; `end` is a
    collective over its ranks.
    """

    def __init__(self, engine: MegatronEngine) -> None:
        self._engine = engine
        self._folder: Path | None = None
        self._writing: Future[Written] | None = None

    def begin(self, folder: Path) -> None:
        """Copy what this rank writes to the host and start writing it."""
        assert self._writing is None, "the save before this one has not been ended"
        engine, rank = self._engine, dist.get_rank()
        texts = {_random_file(rank): json.dumps(_random_state(engine))}
        if rank == 0:
            texts[STATE] = json.dumps(_numbers(engine), indent=1)
        with engine.groups.active():
            share = _Share(rank, list(_pieces(engine)), texts)
        self._folder = folder
        self._writing = _WRITER.submit(_write_and_hash, share, folder, engine)

    def end(self) -> Written:
        """Wait for all files. Returns those of all ranks, hashed by who wrote them, with its host,
        paths within the folder. Raises OSError on all ranks when one could not write."""
        writing, folder = self._writing, self._folder
        assert writing and folder, "no save has begun"
        self._writing = None
        error = writing.exception()  # waits
        failed = _all([] if error is None else [f"rank {dist.get_rank()}: {_named(error, folder)}"])
        if failed:
            raise OSError(f"{folder}: {'; '.join(failed)}")
        host = socket.gethostname()
        seconds = max(_all([writing.result().seconds]))
        return Written(_all([{**entry, HOST: host} for entry in writing.result().files]), seconds)


_WRITER = ThreadPoolExecutor(max_workers=1, thread_name_prefix="checkpoint")
"""One for all roles of the process, which share a disk."""


def _named(error: BaseException, folder: Path) -> str:
    free = shutil.disk_usage(folder).free if folder.exists() else 0
    return f"{type(error).__name__}: {error} ({free / 2**20:.0f} MiB are free there)"


def _write_and_hash(share: _Share, folder: Path, engine: MegatronEngine) -> Written:
    """Without collectives: another thread is in these."""
    started = time.monotonic()
    folder.mkdir(parents=True, exist_ok=True)  # another host may have no such folder yet
    file = file_of(folder, share.rank)
    write_pieces(file, share.pieces)
    share.pieces.clear()
    for name, text in share.texts.items():
        write_text(folder / name, text)
    files = [file, *(folder / name for name in share.texts)]
    if share.rank == 0:
        files += engine.describe(folder)
    entries = [entry_of(folder, file) for file in files]
    sync_folder(folder)
    return Written(entries, time.monotonic() - started)


def load_state(engine: MegatronEngine, folder: Path) -> bool:
    """Take the state in `folder` over, each rank what it holds; a collective over the role's ranks.

    Returns False where the layout is another one: random streams then start from the seed.
    Raises ValueError where the folder holds another model.
    """
    assert engine.optimizer is not None and engine.scheduler is not None, "a frozen model"
    numbers = _checked_numbers(folder / STATE)
    with engine.groups.active():
        _load_tensors(engine, folder, numbers["optimizer_steps"])
    engine.scheduler.num_steps = numbers["scheduler_steps"]
    engine.skipped.in_a_row = numbers["skipped_in_a_row"]
    engine.scheduler.step(increment=0)  # the rates of the configuration at this step
    same = bool(numbers["layout"] == _layout(engine))
    if same:
        file = folder / _random_file(dist.get_rank())
        try:
            _load_random_state(engine, read_json(file))
        except (KeyError, TypeError, ValueError, RuntimeError, OverflowError) as error:
            raise ValueError(f"{file} holds no random streams ({error!r:.200})") from None
    dist.barrier()
    return same


def _checked_numbers(file: Path) -> dict[str, Any]:
    """Errors: ValueError where they are none that a role has."""
    numbers = read_json(file)
    names = ("optimizer_steps", "scheduler_steps", "skipped_in_a_row")
    good = type(numbers) is dict and all(type(numbers.get(name)) is int for name in names)
    if not good or "layout" not in numbers or min(numbers[name] for name in names) < 0:
        raise ValueError(f"{file} must hold the steps of a role; copy the whole folder again")
    return dict(numbers)


def _pieces(engine: MegatronEngine) -> Iterator[Piece]:
    """Copies on the host of what this rank writes."""
    by_parameter = {}
    for shard in shards(engine.weights, engine.groups):
        by_parameter[id(shard.parameter)] = shard
        yield from _copied(WEIGHT, shard, shard.parameter.detach().view(-1), 0, shard.written)
    for held in held_slots(_optimizer(engine)):
        shard = by_parameter[id(held.parameter)]
        flat, start = shard.written, held.start or 0
        if held.start is not None:  # no replica has this slice
            flat = held.flat if shard.is_written else range(0)
        for name, tensor in held.slots.items():
            yield from _copied(name, shard, tensor.view(-1), start, flat)


def _copied(slot: str, shard: Shard, tensor: Tensor, start: int, flat: range) -> Iterator[Piece]:
    """tensor: the numbers of the shard from number `start` on; flat: the range that is written"""
    if not flat:
        return
    copied = tensor[flat.start - start : flat.stop - start].to("cpu", copy=True)
    for part in shard.parts(copied, flat):
        numbers = part.tensor.view(-1) if part.axes == 1 else part.tensor
        yield Piece(slot, part.source, part.box.top, part.box.left, numbers)


def _load_tensors(engine: MegatronEngine, folder: Path, step: int) -> None:
    """Through a bounded buffer on the host, into the tensors of this rank."""
    assert engine.role.architecture is not None, "checked beforehand"
    make_slots(_optimizer(engine), step)
    reader = open_state(folder, engine.role.architecture, engine.head)
    by_parameter = {}
    try:
        for shard in shards(engine.weights, engine.groups):
            by_parameter[id(shard.parameter)] = shard
            weights = shard.parameter.detach().view(-1)
            _fill(reader, WEIGHT, shard, weights, range(weights.numel()))
        for held in held_slots(_optimizer(engine)):
            for name, tensor in held.slots.items():
                shard = by_parameter[id(held.parameter)]
                _fill(reader, name, shard, tensor.view(-1), held.flat)
    finally:
        reader.close()


def _fill(reader: StateReader, slot: str, shard: Shard, tensor: Tensor, flat: range) -> None:
    """tensor: the numbers of the range; those that pad a vocabulary become 0

    Errors: ValueError when the folder has not all of it, or in another dtype.
    """
    filled = 0
    for part in shard.parts(tensor, flat):
        if not reader.has(slot, part.source) or reader.dtype_of(slot, part.source) != tensor.dtype:
            raise ValueError(
                f"{reader.folder} must have {slot} of {part.source} in {tensor.dtype}, as this run "
                "has it; set the role's bf16 as it was in the run that wrote the checkpoint"
            )
        for rows in part.box.in_rows(BUFFER_BYTES // tensor.itemsize):
            target = part.tensor[rows.top - part.box.top : rows.bottom - part.box.top]
            target.copy_(reader.read_box(slot, part.source, rows))
        filled += part.box.numel
    tensor[filled:].zero_()


def _optimizer(engine: MegatronEngine) -> Any:
    assert engine.optimizer is not None, "a frozen model has no training state"
    return engine.optimizer


def _numbers(engine: MegatronEngine) -> dict[str, Any]:
    assert engine.scheduler is not None
    return {
        "optimizer_steps": step_of(_optimizer(engine)),
        "scheduler_steps": engine.scheduler.num_steps,
        "skipped_in_a_row": engine.skipped.in_a_row,
        "layout": _layout(engine),
    }


def _layout(engine: MegatronEngine) -> dict[str, int]:
    groups, role = engine.groups, engine.role
    return {
        "world_size": dist.get_world_size(),
        "tensor_model_parallel_size": groups.tp.size(),
        "pipeline_model_parallel_size": groups.pp.size(),
        "expert_model_parallel_size": groups.ep.size(),
        "model_chunks": role.model_chunks,
    }


def _random_file(rank: int) -> str:
    return f"{RANDOM}/rank_{rank:05d}.json"


def _random_state(engine: MegatronEngine) -> dict[str, Any]:
    """Of the process, and of Megatron's streams for this role."""
    streams = engine.groups.random_state()
    return {
        "process": random_states.process_state(),
        "megatron": {name: random_states.to_text(state) for name, state in streams.items()},
    }


def _load_random_state(engine: MegatronEngine, state: dict[str, Any]) -> None:
    random_states.load_process_state(state["process"])
    streams = {name: random_states.from_text(text) for name, text in state["megatron"].items()}
    engine.groups.load_random_state(streams)


def _all(items: list[T]) -> list[T]:
    """Of all ranks, on every rank."""
    gathered: list[list[T]] = [[]] * dist.get_world_size()
    dist.all_gather_object(gathered, items)
    return [item for part in gathered for item in part]
