"""Send weights to a vLLM server in buckets, and compare what was sent with what it has."""

from __future__ import annotations

import base64
import mmap
import os
import pickle
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor

from mindspeed_rlxf.rollout.transfer import BUCKET_BYTES
from mindspeed_rlxf.rollout.vllm.client import Client, SyncError

Bucket: TypeAlias = list[tuple[str, Tensor]]
"""Complete Hugging Face tensors, contiguous, with their names."""


def make_buckets(tensors: Iterable[tuple[str, Tensor]]) -> Iterator[Bucket]:
    """Split a stream into buckets of at most BUCKET_BYTES, or one tensor."""
    bucket, room = Bucket(), BUCKET_BYTES
    for name, tensor in tensors:
        if bucket and tensor.nbytes > room:
            yield bucket
            bucket, room = [], BUCKET_BYTES
        bucket.append((name, tensor.detach().contiguous()))
        room -= tensor.nbytes
    yield bucket


class SharedMemory:
    """All weights in host memory, where the server's workers read them.

    They are in an anonymous file, which leaves nothing behind, whatever ends this process. They are
    kept for a server that is started anew.
    """

    def __init__(self) -> None:
        self._file, self.num_bytes = os.memfd_create("rlxf-weights"), 0
        self.buckets: list[list[Any]] = []

    def clear(self) -> None:
        """Forget all tensors; their memory is used again."""
        self.buckets, self.num_bytes = [], 0

    def keep(self, bucket: Bucket) -> None:
        """Copy a bucket into the file."""
        places, end = list[Any](), self.num_bytes
        for name, tensor in bucket:
            kind = str(tensor.dtype).removeprefix("torch.")
            places.append([name, kind, list(tensor.shape), end])
            end += -(-tensor.nbytes // 64) * 64
        if end > os.fstat(self._file).st_size:
            os.truncate(self._file, end)
        with mmap.mmap(self._file, end) as memory:
            view = torch.frombuffer(memory, dtype=torch.uint8)
            for (_, tensor), (*_, start) in zip(bucket, places, strict=True):
                view[start : start + tensor.nbytes].copy_(tensor.view(-1).view(torch.uint8))
            del view  # or the file cannot be closed
        self.num_bytes = end
        self.buckets.append(places)

    def send(self, bucket: Bucket, client: Client | None) -> None:
        """Have the bucket read that was kept last; `client` is None once the server has failed."""
        if client is not None:
            self.load(self.buckets[-1], client)

    def load(self, places: list[Any], client: Client) -> None:
        """Have the server load the tensors at these places of the file."""
        path = f"/proc/{os.getpid()}/fd/{self._file}"
        client.call("/update_weights", {"update_info": {"path": path, "tensors": places}})

    def __del__(self) -> None:
        os.close(self._file)


class DeviceHandles:
    """The workers open this device's memory: vLLM's `ipc`, vllm-ascend's `npu_ipc`.

    **Never run on a device.** Every rank of the replica packs the bucket on its device, and the
    leader sends the handles of all.
    """

    def __init__(self, name: str, group: Any, tells_each_time: bool) -> None:
        """`name` is the device's; `tells_each_time`: vLLM 0.23 is told that buckets are packed."""
        self.name, self.group = name, group
        self.extra = {"packed": True} if tells_each_time else {}

    def send(self, bucket: Bucket, client: Client | None) -> None:
        """Send, and keep the memory until every worker has read it; a collective of the replica.

        `client` is None on ranks beside the leader, and there too once the server has failed.
        """
        from torch.multiprocessing.reductions import reduce_tensor

        flat = torch.cat([tensor.view(-1).view(torch.uint8) for _, tensor in bucket])
        handles: list[Any] = [None] * dist.get_world_size(self.group)
        dist.all_gather_object(handles, {self.name: reduce_tensor(flat)[1]}, group=self.group)
        try:
            if client is not None:
                merged = {name: handle for each in handles for name, handle in each.items()}
                update = {
                    "names": [name for name, _ in bucket],
                    "dtype_names": [str(t.dtype).removeprefix("torch.") for _, t in bucket],
                    "shapes": [list(tensor.shape) for _, tensor in bucket],
                    "tensor_sizes": [tensor.nbytes for _, tensor in bucket],
                    "ipc_handles_pickled": base64.b64encode(pickle.dumps(merged)).decode(),
                    **self.extra,
                }
                client.call("/update_weights", {"update_info": update})
        finally:
            dist.barrier(self.group)


def compare_receipts(
    sent: Mapping[str, int], workers: Sequence[Mapping[str, Any]], version: int, limit: float
) -> float:
    """Compare bit sums by name with each worker's `rlxf_receipt`; return the worst answer's error.

    `limit` is for the relative error of layers that can only be asked.

    Raises:
        SyncError: A worker lacks a tensor, or got it twice, or it or another one with other bits,
            or holds something else; names the tensors.
    """
    answers = [0.0]
    for worker in workers:
        received, loaded = worker["received"], worker["loaded"]
        changed = [name for name in sent if received.get(name, [sent[name]])[0] != sent[name]]
        wrong = {
            "not received": [name for name in sent if name not in received],
            "received, but never sent": [name for name in received if name not in sent],
            "received twice": [name for name, sums in received.items() if len(sums) > 1],
            "received with other bits than were sent": changed,
            "loaded with other bits": [n for n in loaded if loaded[n] != sent[n]],
            "not what its layer computes with": [
                name for name, error in worker["answers"].items() if not error <= limit
            ],
        }
        for how, names in wrong.items():
            if names:
                more = f" and {len(names) - 3} more" if len(names) > 3 else ""
                text = f"{', '.join(names[:3])}{more}: {how}"
                raise SyncError(f"weights of version {version}: {text}")
        if worker["version"] != str(version):
            raise SyncError(f"the server has version {worker['version']!r}, not {version}")
        answers += worker["answers"].values()
    return max(answers)
