"""Measure the rollout engines native, vllm and transformers side by side, on one device.

Workloads as in `rollout.py`, with random weights of its Llama (18.9 M parameters), or those of
`--model FOLDER`: `equal` has 16 prompts of 64 tokens and 128 new tokens each, `mix` the response
lengths of `rollout_lengths.json`, at most 16 at a time. All generate through the same interface,
fp32 (`--bf16`: bf16), sampling at temperature 1, and take turns; medians of `--repeats`. vLLM runs
in a server process. `sync_s` is a whole update of the weights, with receipts; `memory_mib` what the
engine's processes hold afterwards, with the KV cache (1 GiB for vLLM).

Prints one JSON line.

    python benchmarks/engines.py --python .venv-vllm/bin/python [--model FOLDER] [--quick]
"""

import argparse
import json
import os
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import torch
import torch.distributed as dist
from rollout import LENGTHS, MODEL, ROWS, SEED
from transformers import AutoModelForCausalLM, LlamaConfig

from mindspeed_rlxf import device
from mindspeed_rlxf.config.compose import compose
from mindspeed_rlxf.config.enums import DeviceKind
from mindspeed_rlxf.config.load import resolve
from mindspeed_rlxf.config.schema import RunConfig
from mindspeed_rlxf.rollout.rollout_engine import GenerationRequest
from mindspeed_rlxf.rollout.sampling import SamplingSettings


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--python", required=True, help="interpreter that has vLLM")
    parser.add_argument("--model", type=Path, help="Hugging Face folder")
    parser.add_argument("--bf16", action="store_true")
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--quick", action="store_true")
    options = parser.parse_args()
    device.setup(DeviceKind.CPU, options.threads)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    with tempfile.TemporaryDirectory() as made:
        folder = options.model or random_llama(Path(made))
        print(json.dumps(measure(options, folder, Path(made))))


def random_llama(folder: Path) -> Path:
    a = MODEL
    config = LlamaConfig(
        num_hidden_layers=a.num_layers, hidden_size=a.hidden_size,
        intermediate_size=a.ffn_hidden_size, num_attention_heads=a.num_attention_heads,
        num_key_value_heads=a.kv_heads, vocab_size=a.vocab_size, tie_word_embeddings=True,
        max_position_embeddings=a.max_position_embeddings, rms_norm_eps=a.norm_epsilon,
    )  # fmt: skip
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return folder


def make_config(options: argparse.Namespace, folder: Path) -> RunConfig:
    keys = {
        "training.model": "auto", "training.seq_length": 1024, "training.seed": SEED,
        "training.bf16": options.bf16, "actor_rollout.num_samples_per_step": ROWS,
        **{f"{role}.load": folder for role in ("actor_rollout", "ref", "critic")},
        "resource_pool.main": 1, "device.kind": "cpu", "device.cpu_threads": options.threads,
        "rollout.engine": "vllm", "rollout.vllm.python": options.python,
    }  # fmt: skip
    tree = compose("ppo_trainer_tiny", [f"{key}={value}" for key, value in keys.items()])
    tree.pop("model")
    return resolve(tree, "engines")


def make_engines(config: RunConfig, folder: Path, bf16: bool) -> dict[str, Any]:
    from mindspeed_rlxf.device import megatron_versions
    from mindspeed_rlxf.rollout.hf_rollout import TransformersRollout
    from mindspeed_rlxf.rollout.native import NativeRollout
    from mindspeed_rlxf.rollout.vllm.engine import VllmRollout
    from mindspeed_rlxf.rollout.weights import OwnWeights

    megatron_versions.apply_patches()
    dtype = torch.bfloat16 if bf16 else torch.float32
    source = OwnWeights(config.actor_rollout.architecture, 1, dtype, SEED)
    return {
        "vllm": VllmRollout(config, str(folder)),
        "native": NativeRollout(source, max_rows=ROWS),
        "transformers": TransformersRollout(config.actor_rollout),
    }


def memory_mib(name: str, engine: Any) -> int:
    processes = [psutil.Process()]
    if name == "vllm":
        server = psutil.Process(engine.server.process.pid)
        processes = [server, *server.children(recursive=True)]
    return round(sum(each.memory_full_info().pss for each in processes) / 2**20)


def measure(options: argparse.Namespace, folder: Path, scratch: Path) -> dict[str, Any]:
    config = make_config(options, folder)
    dtype = torch.bfloat16 if options.bf16 else torch.float32
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
    weights = dict(model.named_parameters())
    found: dict[str, Any] = {
        "benchmark": "engines", "model": folder.name if options.model else "random Llama",
        "parameters": sum(p.numel() for p in weights.values()), "dtype": str(dtype),
        "threads": options.threads, "cores": os.cpu_count(), "torch": torch.__version__,
    }  # fmt: skip
    engines = make_engines(config, scratch, options.bf16)
    for name, engine in engines.items():
        times = []
        for version in range(4):
            started = time.perf_counter()
            engine.update_weights(((n, p.data) for n, p in weights.items()), version)
            times.append(time.perf_counter() - started)
        engine.wake()
        found[name] = {"sync_s": round(statistics.median(times[1:]), 3)}
    lengths = json.loads(LENGTHS.read_text(encoding="utf-8"))["responses"]
    works = {"equal": [128] * ROWS, "mix": lengths}
    if options.quick:
        works = {"equal": [16] * ROWS, "mix": lengths[:20]}
    vocab = config.actor_rollout.architecture.vocab_size
    for work, wanted in works.items():
        spent: dict[str, list[float]] = {name: [] for name in engines}
        for repeat in range(1 + (1 if options.quick else options.repeats)):  # the first warms up
            for name, engine in engines.items():
                seconds = generate(engine, wanted if repeat else [24] * ROWS, vocab)
                spent[name] += [seconds] if repeat else []
        for name, seconds in spent.items():
            rate = sum(wanted) / statistics.median(seconds)
            found[name][f"{work}_tokens_per_s"] = round(rate, 1)
    for name, engine in engines.items():
        found[name]["memory_mib"] = memory_mib(name, engine)
    for work in works:
        key = f"{work}_tokens_per_s"
        found[f"{work}_native_over_vllm"] = round(found["native"][key] / found["vllm"][key], 3)
    engines["vllm"].server.end()
    return found


def generate(engine: Any, lengths: Sequence[int], vocab: int) -> float:
    prompts = np.random.default_rng(SEED).integers(1, vocab, (len(lengths), 64))
    asked = [
        GenerationRequest(i, i, prompts[i], SamplingSettings(True, 1.0, 0, 1.0, 0, n, ()), SEED)
        for i, n in enumerate(lengths)
    ]
    started = time.perf_counter()
    assert sum(len(result.tokens) for result in engine.generate(asked)) == sum(lengths)
    return time.perf_counter() - started


if __name__ == "__main__":
    main()
