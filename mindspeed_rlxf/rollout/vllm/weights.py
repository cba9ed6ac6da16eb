"""Send weights to a vLLM server in buckets."""

from __future__ import annotations

import base64
import os
import pickle
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor
from torch.multiprocessing.reductions import reduce_tensor

from mindspeed_rlxf import device
from mindspeed_rlxf.config.lora import LoraConfig
from mindspeed_rlxf.models.parameters import Head
from mindspeed_rlxf.rollout import transfer
from mindspeed_rlxf.rollout.bit_sums import bit_sum
from mindspeed_rlxf.rollout.vllm.client import Client
from mindspeed_rlxf.weights.peft_folder import write_adapter

Bucket: TypeAlias = list[tuple[str, Tensor]]
"""Complete Hugging Face tensors with their names."""


class SharedMemory:
    """All weights in host memory, where a CPU server's workers read them.

    They are in an anonymous file, which leaves nothing behind, whatever ends this process.
    """

    def __init__(self) -> None:
        self._file, self.num_bytes = open(os.memfd_create("rlxf-weights"), "rb"), 0  # noqa: SIM115
        self.path = f"/proc/{os.getpid()}/fd/{self._file.fileno()}"
        self.buckets: list[list[Any]] = []

    def keep(self, bucket: Bucket) -> None:
        """Copy a bucket into the file."""
        places = list[Any]()
        for name, tensor in bucket:
            kind = str(tensor.dtype).removeprefix("torch.")
            places.append([name, kind, list(tensor.shape), self.num_bytes])
            self.num_bytes += -(-tensor.nbytes // 64) * 64
        os.truncate(self.path, self.num_bytes)  # from_file spoils a file that it extends
        memory = torch.from_file(self.path, True, self.num_bytes, dtype=torch.uint8)
        for (_, tensor), (*_, start) in zip(bucket, places, strict=True):
            memory[start : start + tensor.nbytes] = tensor.contiguous().view(-1).view(torch.uint8)
        self.buckets.append(places)

    def load(self, places: list[Any], client: Client) -> None:
        """Have the server load the tensors at these places of the file."""
        client.call("/update_weights", {"update_info": {"path": self.path, "tensors": places}})


class AdapterFolder:
    """An adapter in host memory, and as a folder in PEFT's format that the server's workers read.

    Attributes:
        tensors: A and B of each module by name, on the host; {} without adapters.
        sums: Their bit sums.
    """

    def __init__(self, lora: LoraConfig, base: str) -> None:
        self.lora, self.base = lora, base
        self.clear()

    def clear(self) -> None:
        """Forget the tensors."""
        self.tensors, self.sums = dict[str, Tensor](), dict[str, int]()

    def keep(self, tensors: Iterable[tuple[str, Tensor]]) -> None:
        """Copy tensors to the host."""
        for name, tensor in tensors:
            self.tensors[name] = tensor.detach().to("cpu", copy=True).contiguous()
            self.sums[name] = bit_sum(tensor)

    @property
    def num_bytes(self) -> int:
        """Bytes of all tensors."""
        return sum(tensor.nbytes for tensor in self.tensors.values())

    @contextmanager
    def written(self) -> Iterator[str]:
        """Write the folder, in memory where the system has such a file system; remove it after."""
        parent = "/dev/shm" if os.path.isdir("/dev/shm") else None
        with tempfile.TemporaryDirectory(prefix="rlxf-adapter-", dir=parent) as folder:
            write_adapter(Path(folder), self.tensors, self.lora, (), Head.LANGUAGE_MODEL, self.base)
            yield folder


class DeviceBuffer:
    """Device memory that the server's workers open: vLLM's `ipc`, vllm-ascend's `npu_ipc`.

    **Never run on a device.** All buckets of an update pass through one buffer, because workers
    keep what they open until the next update.
    """

    def __init__(self, group: Any, tells_packed: bool) -> None:
        """`group` has the replica's ranks; `tells_packed`: each bucket says so, for vLLM 0.23."""
        self.group, self.tells_packed = group, tells_packed
        self._memory = torch.empty(0, dtype=torch.uint8)
        self._handle: Any = None

    def send(self, bucket: Bucket, client: Client | None) -> None:
        """Have the workers load a bucket; a collective of the replica.

        Every rank packs the bucket on its device, the leader sends the handles of all, and no rank
        overwrites its buffer before they were read. `client` is None on other ranks, and once the
        server has failed.
        """
        sizes = [tensor.nbytes for _, tensor in bucket]
        if sum(sizes) > len(self._memory):
            size = max(sum(sizes), transfer.BUCKET_BYTES)
            self._memory = torch.empty(size, dtype=torch.uint8, device=device.current_device())
            self._handle = reduce_tensor(self._memory)[1]
        spaces = self._memory[: sum(sizes)].split(sizes)
        for (_, tensor), space in zip(bucket, spaces, strict=True):
            space.copy_(tensor.contiguous().view(-1).view(torch.uint8))
        device.synchronize()  # other processes do not wait for this one's streams
        handles: list[Any] = [None] * dist.get_world_size(self.group)
        dist.all_gather_object(handles, {device.identity(): self._handle}, group=self.group)
        try:
            if client is not None:
                merged = {name: handle for each in handles for name, handle in each.items()}
                update = {
                    "names": [name for name, _ in bucket],
                    "dtype_names": [str(t.dtype).removeprefix("torch.") for _, t in bucket],
                    "shapes": [list(tensor.shape) for _, tensor in bucket],
                    "tensor_sizes": sizes,
                    "ipc_handles_pickled": base64.b64encode(pickle.dumps(merged)).decode(),
                    **({"packed": True} if self.tells_packed else {}),  # later from init_info
                }
                client.call("/update_weights", {"update_info": update})
        finally:
            dist.barrier(self.group)
