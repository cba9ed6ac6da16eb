"""What a trained role has to remember, written to and read from a folder by all its ranks.

    *.distcp, .metadata, common.pt, metadata.json   weights and Adam's slots, by megatron-core
    random/rank_00003.json                          random streams of a rank
    state.json                                      steps taken, layout
    config.json, tokenizer.json, ...                what describes the model to who converts it

Sharded tensors can be read in any layout, random streams only in that which wrote them. Learning
rates and other settings of the optimizer are not here: the configuration has them.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.mapping import (
    ShardedTensor,
    ShardedTensorFactory,
    is_main_replica,
)
from torch import Tensor

from mindspeed_rlxf.checkpoint import host_part
from mindspeed_rlxf.checkpoint.host_part import HostView
from mindspeed_rlxf.checkpoint.run_files import (
    HOST,
    Entry,
    Written,
    content_problem,
    entry_of,
    sync_folder,
    write_text,
)
from mindspeed_rlxf.device import random_states
from mindspeed_rlxf.engine.sharded_files import ShardedSave, told
from mindspeed_rlxf.engine.slots import empty_slots, fill_slots, held_slots, step_of

if TYPE_CHECKING:
    from mindspeed_rlxf.engine.engine import MegatronEngine

STATE = "state.json"
RANDOM = "random"
OF_THE_FIRST = (".metadata", "common.pt", "metadata.json", STATE)
SEEN_WITHIN_S = 10.0
T = TypeVar("T")
Sharded: TypeAlias = ShardedTensor | ShardedTensorFactory


class StateSaver:
    """Writes the role's part of a checkpoint, from copies on the host.

    Between `begin` and `end` files are written in a thread while the role works on; both are
    collectives over its ranks.
    """

    def __init__(self, engine: MegatronEngine) -> None:
        self._engine = engine
        self._folder: Path | None = None
        self._save: ShardedSave | None = None
        self._writing: Future[Written] | None = None

    def begin(self, folder: Path) -> None:
        """Copy the state to the host and start writing it."""
        assert self._writing is None, "the save before this one has not been ended"
        engine, rank = self._engine, dist.get_rank()
        if rank == 0 or not folder.exists():  # another host may have no such folder yet
            folder.mkdir(parents=True, exist_ok=True)
        dist.barrier()
        with engine.groups.active():
            self._save = ShardedSave.begin(_state_to_save(engine), folder)
        write_text(_random_file(folder, rank), json.dumps(_random_state(engine)))
        if rank == 0:
            write_text(folder / STATE, json.dumps(_numbers(engine), indent=1))
        self._folder = folder
        self._writing = _WRITER.submit(_write_and_hash, self._save, folder, rank, engine)

    def end(self) -> Written:
        """Wait for all files. Returns those of all ranks, hashed by who wrote them, with its host,
        paths within the folder. Raises OSError on all ranks when one could not write."""
        writing, save, folder = self._writing, self._save, self._folder
        assert writing and save and folder, "no save has begun"
        self._writing = self._save = None
        error = writing.exception()  # waits; Megatron has its own way to tell of a failed write
        with self._engine.groups.active():
            save.finish()
        failed = _all([] if error is None else [f"rank {dist.get_rank()}: {error}"])
        if failed:
            raise OSError(f"{folder}: {'; '.join(failed)}")
        entries = list(writing.result().files)
        if dist.get_rank() == 0:
            entries += [entry_of(folder, folder / name) for name in OF_THE_FIRST]
            sync_folder(folder)
        host = host_part.view(sees=True).host
        seconds = max(_all([writing.result().seconds]))
        return Written(_all([{**entry, HOST: host} for entry in entries]), seconds)


_WRITER = ThreadPoolExecutor(max_workers=1, thread_name_prefix="checkpoint")
"""One for all roles of the process: Megatron's results come in the order of the saves."""


def _write_and_hash(save: ShardedSave, folder: Path, rank: int, engine: MegatronEngine) -> Written:
    """Without collectives: another thread is in these."""
    started = time.monotonic()
    save.write()
    files = [*sorted(folder.glob(f"__{rank}_*.distcp")), _random_file(folder, rank)]
    if rank == 0:
        files += engine.describe(folder)
    entries = [entry_of(folder, file) for file in files]
    return Written(entries, time.monotonic() - started)


def load_state(engine: MegatronEngine, folder: Path) -> bool:
    """Take the state in `folder` over; a collective over the role's ranks.

    Returns False where the layout is another one: random streams then start from the seed.
    Raises ValueError where the folder holds another model.
    """
    assert engine.optimizer is not None and engine.scheduler is not None, "a frozen model"
    numbers = json.loads((folder / STATE).read_text(encoding="utf-8"))
    with engine.groups.active():
        _load_tensors(engine, folder, int(numbers["optimizer_steps"]))
    engine.scheduler.num_steps = int(numbers["scheduler_steps"])
    engine.skipped.in_a_row = int(numbers["skipped_in_a_row"])
    engine.scheduler.step(increment=0)  # the rates of the configuration at this step
    same = bool(numbers["layout"] == _layout(engine))
    if same:
        text = _random_file(folder, dist.get_rank()).read_text(encoding="utf-8")
        _load_random_state(engine, json.loads(text))
    dist.barrier()
    return same


def views(file: Path) -> list[HostView]:
    """By rank: its host, and whether `file` is there; a collective, the same everywhere.

    A network file system may take a moment to show a new file to other hosts.
    """
    dist.barrier()  # who writes it is there too
    deadline = time.monotonic() + SEEN_WITHIN_S
    while not file.exists() and time.monotonic() < deadline:
        time.sleep(0.2)
    return _all([host_part.view(file.exists())])


def damage(folder: Path, entries: list[Entry], on_each_host: bool) -> list[str]:
    """What is wrong with the files; a collective, the same everywhere.

    Each is read by one rank, or by one of each host, as where each has files of its own.
    """
    rank = dist.get_rank()
    readers = list(range(dist.get_world_size()))
    if on_each_host:
        hosts = _all([host_part.view(sees=True)])
        readers = [other for other in readers if hosts[other] == hosts[rank]]
    mine = entries[readers.index(rank) :: len(readers)]
    problems = [content_problem(folder, entry) for entry in mine]
    return _all([problem for problem in problems if problem is not None])


def _state_to_save(engine: MegatronEngine) -> dict[str, Any]:
    bases = _sharded_parameters(engine)
    state: dict[str, Any] = {
        "weights": {
            f"{i}": replace(base, data=_to_write(base, base.data)) for i, base in enumerate(bases)
        }
    }
    places = {id(base.data): (i, base) for i, base in enumerate(bases)}
    for parameter, slots in held_slots(_optimizer(engine)):
        i, base = places[id(parameter)]
        for name, tensor in slots.items():
            place = _slot(base, name, tensor, engine)
            state.setdefault(name, {})[f"{i}"] = replace(place, data=_to_write(place, tensor))
    return state


def _to_write(place: Sharded, tensor: Tensor) -> Tensor:
    """A copy on the host, which the next optimizer step does not change; of what other ranks
    write, as replicas do, the tensor itself."""
    return tensor.detach().to("cpu", copy=True) if is_main_replica(place.replica_id) else tensor


def _load_tensors(engine: MegatronEngine, folder: Path, step: int) -> None:
    """Through the host: the device never holds a second copy."""
    bases = _sharded_parameters(engine)
    targets: dict[str, Any] = {
        "weights": {
            f"{i}": replace(base, data=torch.zeros_like(base.data, device="cpu"))
            for i, base in enumerate(bases)
        }
    }
    numbers = {id(base.data): i for i, base in enumerate(bases)}
    for parameter, slots in empty_slots(_optimizer(engine)):
        i = numbers[id(parameter)]
        for name, tensor in slots.items():
            shape = _slot(bases[i], name, tensor, None)
            targets.setdefault(name, {})[f"{i}"] = shape
    names = [name for name in targets if name != "weights"]
    with told(folder):
        found = dist_checkpointing.load(targets, str(folder), validate_access_integrity=False)
    for i, base in enumerate(bases):
        base.data.data.copy_(found["weights"][f"{i}"])

    def slots_of(parameter: Tensor) -> dict[str, Tensor]:
        return {name: found[name][f"{numbers[id(parameter)]}"] for name in names}

    fill_slots(_optimizer(engine), slots_of, step)


def _sharded_parameters(engine: MegatronEngine) -> list[Sharded]:
    """Where each parameter of this rank lies in the whole model."""
    return [
        item
        for chunk in engine.chunks
        for item in _leaves(chunk.sharded_state_dict())
        if isinstance(item, (ShardedTensor, ShardedTensorFactory))
    ]


def _leaves(tree: Any) -> Iterator[Any]:
    if isinstance(tree, dict):
        tree = list(tree.values())
    if isinstance(tree, list):
        for item in tree:
            yield from _leaves(item)
    else:
        yield tree


def _slot(base: Sharded, name: str, tensor: Tensor, engine: MegatronEngine | None) -> Sharded:
    """The place of a slot: that of its parameter, under a name of its own.

    engine: None to read. To write, what stands on one rank of a data-parallel group alone is the
    one that counts.
    """
    keys: dict[str, Any] = {"key": f"optimizer.state.{name}.{base.key}", "data": tensor}
    if isinstance(base, ShardedTensor):
        keys["dtype"] = tensor.dtype
    if engine is not None and _is_distributed(engine):
        keys["replica_id"] = (*base.replica_id[:-1], 0)  # type: ignore[index, misc]
    return replace(base, **keys)


def _is_distributed(engine: MegatronEngine) -> bool:
    return bool(engine.models[0].ddp_config.use_distributed_optimizer)


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


def _random_file(folder: Path, rank: int) -> Path:
    return folder / RANDOM / f"rank_{rank:05d}.json"


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
