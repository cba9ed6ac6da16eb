"""Measure how long weights take from a rank that trains to a rank that only generates.

Two processes on the CPU, TP 1: one streams the Hugging Face tensors of a model and sends them in
buckets, the other checks each bucket and copies the tensors into a rollout module. `bare_s`:
broadcasts of the same bytes in the same buckets, without checksums and copies. `..._cpu_s`:
processor seconds of both processes, which other programs disturb less. Medians of
`--repeats`; transfers and bare broadcasts take turns. Prints one JSON line.

    python benchmarks/weights.py [--layers 23] [--dtype float32|bfloat16] [--threads 1]
"""

import argparse
import json
import socket
import statistics
import sys
import time
from datetime import timedelta
from math import prod
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from mindspeed_rlxf import device
from mindspeed_rlxf.config.architecture import ArchitectureConfig
from mindspeed_rlxf.config.enums import DeviceKind

SEED, WAIT = 1, timedelta(seconds=300)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=int, default=23, help="of 10.2 M parameters each")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument("--threads", type=int, default=1, help="of each process")
    parser.add_argument("--repeats", type=int, default=5)
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    mp.spawn(run_rank, (port, parser.parse_args()), nprocs=2)


def run_rank(rank: int, port: int, arguments: argparse.Namespace) -> None:
    """Train (rank 0) or generate (rank 1), and time each transfer from start to barrier."""
    device.setup(DeviceKind.CPU, arguments.threads)
    from mindspeed_rlxf.device import megatron_versions, worlds
    from mindspeed_rlxf.engine.hf_stream import hf_tensors
    from mindspeed_rlxf.models.parameters import Head, hf_shapes
    from mindspeed_rlxf.rollout import transfer
    from mindspeed_rlxf.rollout.weights import OwnWeights
    from mindspeed_rlxf.weights.stage_loader import StageWeights

    megatron_versions.apply_patches()
    store = dist.TCPStore("127.0.0.1", port, 2, rank == 0, WAIT)
    worlds.join("gloo", store, rank, (1, 1), WAIT)
    group, dtype = worlds.weights_group(), getattr(torch, arguments.dtype)
    assert group is not None, "both ranks are in it"
    a = ArchitectureConfig(
        num_layers=arguments.layers, hidden_size=1024, ffn_hidden_size=2560, num_attention_heads=8,
        num_query_groups=2, vocab_size=32768, max_position_embeddings=1024,
    )  # fmt: skip
    own, head = OwnWeights(a, 1, dtype, SEED), Head.LANGUAGE_MODEL
    groups = own.groups
    stage = StageWeights(own.module, a, head, groups.tp, groups.pp, groups.ep)
    for tensor in stage.tensors.values():
        tensor.data.fill_(1.5 if rank == 0 else 0)
    buckets = transfer.make_buckets(hf_shapes(a, head), dtype.itemsize)
    numbers = [sum(map(prod, bucket.values())) for bucket in buckets]
    flat = torch.ones(max(numbers), dtype=dtype)
    seconds: dict[str, list[tuple[float, float]]] = {"transfer": [], "bare": []}
    for _ in range(arguments.repeats + 1):
        for name, times in seconds.items():
            dist.barrier(group)
            started, cpu = time.perf_counter(), time.process_time()
            if name == "bare":
                for count in numbers:
                    dist.broadcast(flat[:count], 0, group)
            elif rank == 0:
                transfer.send(hf_tensors(stage, groups, 1), buckets, group)
            else:
                own.load(transfer.receive(buckets, dtype, group))
            dist.barrier(group)
            times.append((time.perf_counter() - started, time.process_time() - cpu))
    assert all(bool((tensor == 1.5).all()) for tensor in stage.tensors.values()), "all arrived"
    found: dict[str, float] = {"gigabytes": sum(numbers) * dtype.itemsize / 1e9}
    for name, times in seconds.items():
        wall, cpu = (statistics.median(each) for each in zip(*times[1:], strict=True))
        both = torch.tensor(cpu)
        dist.all_reduce(both, group=group)
        found |= {f"{name}_s": round(wall, 3), f"{name}_cpu_s": round(float(both), 3)}
    if rank == 0:
        print(json.dumps(found))
    worlds.leave()


if __name__ == "__main__":
    main()
