"""The training state of a sharded model, written by torch.distributed.checkpoint.

    sharded/__3_0.distcp    weights and Adam moments of the rank's shards
    sharded/.metadata       every tensor's place
    random/, state.json, config.json, ...       as with Megatron's engine (`train_state`)

Any number of ranks reads the tensors, each its own rows, without running code in the files.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.metadata import StorageMeta
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from mindspeed_rlxf import device
from mindspeed_rlxf.engine.collective_errors import fail_together, gather_all, raise_os_errors
from mindspeed_rlxf.engine.fsdp.model import Groups
from mindspeed_rlxf.engine.fsdp.optimizer import ShardedAdam
from mindspeed_rlxf.engine.fsdp.weights import TensorShard
from mindspeed_rlxf.engine.role_files import (
    RANDOM_FILE,
    STATE,
    WRITER,
    IndexRows,
    load_checked,
    write_files,
)
from mindspeed_rlxf.engine.step_guard import SkippedSteps
from mindspeed_rlxf.weights.chunks import Chunk
from mindspeed_rlxf.weights.state_files import Loaded
from mindspeed_rlxf.weights.torch_dist import read_metadata_tensors

SHARDED = "sharded"  # folder of the tensors
WEIGHT = "weight"  # of keys WEIGHT/NAME, beside those of the moments
Copy = Callable[[Tensor], Tensor]
"""Returns a host copy of a device tensor, wherever it is now."""


class ShardedState:
    """The state that training changes on this rank, and its save in progress."""

    def __init__(
        self,
        shards: Mapping[str, TensorShard],
        optimizer: ShardedAdam,
        skipped: SkippedSteps,
        groups: Groups,
        describe: Callable[[Path], list[Path]],
        copy: Copy,
    ) -> None:
        self.shards = shards
        self.optimizer = optimizer
        self.skipped = skipped
        self.groups = groups
        self.describe = describe
        self.copy = copy
        self.saving: tuple[Path, Future[float]] | None = None

    def _tensors(self) -> dict[str, tuple[TensorShard, Tensor]]:
        """Return {KIND/NAME: (the parameter, this rank's rows)} for trained parameters.

        The kind is WEIGHT or one of MOMENTS.
        """
        rows_by_key = {f"{WEIGHT}/{name}": main.data for name, main in self.optimizer.mains.items()}
        rows_by_key |= self.optimizer.moments()
        tensors = {}
        for key, rows in rows_by_key.items():
            name = key.partition("/")[2]
            tensors[key] = (self.shards[name], rows)
        return tensors

    def _layout(self) -> dict[str, int]:
        cp = self.groups.cp
        return {"world_size": dist.get_world_size(), "ulysses": cp.size() if cp else 1}

    def begin_save(self, folder: Path) -> None:
        """Copy this rank's share to the host, and start writing it in a thread; a collective."""
        assert self.saving is None, "the save before this one has not been ended"
        rank = dist.get_rank()
        group = self.groups.saving
        texts = {RANDOM_FILE.format(rank): json.dumps(device.process_state())}
        steps = max(gather_all([self.optimizer.steps]))
        if rank == 0:
            numbers = {
                "optimizer_steps": steps,
                "scheduler_steps": self.optimizer.scheduler_steps,
                "skipped_in_a_row": self.skipped.in_a_row,
                "layout": self._layout(),
            }
            texts[STATE] = json.dumps(numbers, indent=1)
        mesh = DeviceMesh.from_group(group, "cpu")
        tensors = {}
        for key, (shard, rows) in self._tensors().items():
            tensors[key] = DTensor.from_local(
                self.copy(rows),
                mesh,
                [Shard(0)],
                run_check=False,
                shape=shard.shape,  # type: ignore[arg-type]
                stride=torch.empty(shard.shape, device="meta").stride(),
            )

        def write() -> tuple[list[Path], IndexRows]:
            # Collectives of this group run in this thread alone, in the same order on all ranks.
            target = folder / SHARDED
            with raise_os_errors(folder):
                writer = _Writer(target, sync_files=True)
                dcp.save(tensors, storage_writer=writer, process_group=group)
            tensors.clear()
            files = sorted(target.glob(f"__{rank}_*.distcp"))
            if rank == 0:
                files.append(target / ".metadata")
            return files, {}

        # Now, as other ranks would wait in the thread for one that cannot; with `runtime: local`
        # the first rank makes the folder above right before.
        with fail_together(folder):
            folder.mkdir(parents=True, exist_ok=True)
        writing = WRITER.submit(write_files, folder, rank, write, texts, self.describe)
        self.saving = folder, writing

    def load(self, folder: Path) -> Loaded:
        """Load a training state; return any rank's problem, on every rank, or the success."""
        return load_checked(folder, lambda: self._load_share(folder))

    def _load_share(self, folder: Path) -> bool:
        if not (folder / STATE).exists() or not (folder / SHARDED).is_dir():
            raise ValueError(f"{folder} has no state of this engine; use the backend that wrote it")
        numbers = json.loads((folder / STATE).read_bytes())
        # The run wrote these files, and their hashes fit.
        stored = read_metadata_tensors(folder / SHARDED, trust_files=True)
        for key, (shard, rows) in self._tensors().items():
            tensor = stored.get(key)
            if tensor is None or tensor.shape != shard.shape or tensor.dtype != rows.dtype:
                raise ValueError(
                    f"the checkpoint must have {key} as {list(shard.shape)} in {rows.dtype}; use "
                    "the model and bf16 of the run that wrote it"
                )
            start = (shard.start, *[0] * (len(shard.shape) - 1))
            rows.copy_(tensor.read(Chunk(start, tuple(rows.shape))))
        self.optimizer.steps = numbers["optimizer_steps"]
        self.optimizer.scheduler_steps = numbers["scheduler_steps"]
        self.optimizer.advance(0)  # the rate of the configuration at this step
        self.skipped.in_a_row = numbers["skipped_in_a_row"]
        if numbers["layout"] != self._layout():
            return False
        streams: Any = json.loads((folder / RANDOM_FILE.format(dist.get_rank())).read_bytes())
        return device.load_process_state(streams)


class _Writer(dcp.FileSystemWriter):
    """Writes no path and no random number, so that equal runs write equal files."""

    def storage_meta(self) -> StorageMeta:
        """Return nothing about this save."""
        return StorageMeta()
