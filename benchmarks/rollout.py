"""Measure generation by the native engine beside `transformers.generate` with the same weights.

Two workloads of a Llama of 18.9 M parameters, fp32, sdpa, sampling at temperature 1. `equal`: 16
prompts of 64 tokens, 128 new tokens each. `mix`: prompts of 64 tokens with the response lengths of
`rollout_lengths.json`, 16 at a time; transformers generates each batch of 16 until its longest
response ends, the native engine refills finished rows. Lengths are forced by position. The two
engines take turns in one process, each with the number of threads that is fastest for it; medians
of 5 (`--repeats`). Beside wall seconds stand CPU seconds, which other programs disturb less.

`cost`: CPU time and dispatched operators of one decode step, of a model of 28 layers so small that
computation hardly counts, with one thread. Each is the difference between a generation of 40 new
tokens and one of 8, over 32. Operators are those that a TorchDispatchMode sees, views included,
after it has decomposed those without a kernel of their own.

Prints one JSON line. With `--baseline CHECKOUT` also the figures of another checkout of this
package, measured in a process of its own before and after, and the ratios to them.

    python benchmarks/rollout.py [--device cpu|cuda|npu] [--quick] [--parts equal,mix,cost]
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import LlamaConfig, LlamaForCausalLM, StoppingCriteria, StoppingCriteriaList

from mindspeed_rlxf import device
from mindspeed_rlxf.config.architecture import ArchitectureConfig
from mindspeed_rlxf.config.enums import DeviceKind

LENGTHS = Path(__file__).with_name("rollout_lengths.json")
ROWS, SEED = 16, 1
MODEL = ArchitectureConfig(
    num_layers=8,
    hidden_size=384,
    ffn_hidden_size=1024,
    num_attention_heads=6,
    num_query_groups=2,
    vocab_size=16384,
    max_position_embeddings=1024,
)
TOY = MODEL.model_copy(
    update={
        "num_layers": 28,
        "hidden_size": 32,
        "ffn_hidden_size": 64,
        "num_attention_heads": 4,
        "vocab_size": 64,
    }
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", type=DeviceKind, default=DeviceKind.CPU)
    parser.add_argument("--quick", action="store_true", help="one short repetition of each")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--parts", default="equal,mix,cost")
    parser.add_argument("--baseline", type=Path, metavar="CHECKOUT", help="measure this one too")
    parser.add_argument("--ours-only", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument(
        "--write-lengths", type=int, metavar="SEED", help="draw new lengths and store them first"
    )
    arguments = parser.parse_args()
    if arguments.write_lengths is not None:
        LENGTHS.write_text(json.dumps(make_lengths(arguments.write_lengths)) + "\n", "utf-8")
    if arguments.baseline and not (arguments.baseline / "mindspeed_rlxf" / "__init__.py").is_file():
        parser.error(f"--baseline must be a checkout of this package: {arguments.baseline} is not")
    before = [measure_baseline(arguments)] if arguments.baseline else []
    found = measure(arguments)
    if arguments.baseline:
        found["baseline"] = compare(found, [*before, measure_baseline(arguments)])
    print(json.dumps(found))


def make_lengths(seed: int, count: int = 64, limit: int = 512) -> dict[str, object]:
    """Draw log-normal response lengths of 8 tokens up to the limit, whose mean is 40% of it."""
    rng = np.random.default_rng(seed)
    drawn = rng.lognormal(0.0, 0.8, count)
    scales = np.linspace(1, limit, 4096)
    means = [(drawn * scale).clip(8, limit).mean() for scale in scales]
    scale = scales[int(np.abs(np.array(means) - 0.4 * limit).argmin())]
    lengths = (drawn * scale).clip(8, limit).astype(int)
    made = f"default_rng({seed}): lognormal(0, 0.8) scaled to a mean of 40% of {limit}, in 8.."
    return {"made": made, "prompt": 64, "limit": limit, "responses": lengths.tolist()}


def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    """Set up the device and measure the parts that are asked for, in this process."""
    device.setup(arguments.device)
    dist.init_process_group(
        device.facts(arguments.device).backend, store=dist.HashStore(), rank=0, world_size=1,
        timeout=timedelta(minutes=5),
    )  # fmt: skip
    parts, repeats = arguments.parts.split(","), 1 if arguments.quick else arguments.repeats
    found: dict[str, Any] = {
        "benchmark": "rollout",
        "device": str(device.current_device()),
        "cores": os.cpu_count(),
        "torch": torch.__version__,
    }
    if {"equal", "mix"} & set(parts):
        pair = Pair(MODEL, with_peer=not arguments.ours_only)
        found["parameters"] = sum(p.numel() for p in pair.peer.parameters())
        if "equal" in parts:
            found["equal"] = pair.race([8 if arguments.quick else 128] * ROWS, repeats)
        if "mix" in parts:
            lengths = json.loads(LENGTHS.read_text(encoding="utf-8"))["responses"]
            found["mix"] = pair.race(lengths[:20] if arguments.quick else lengths, repeats)
    if "cost" in parts:
        found["cost"] = step_cost(Pair(TOY, with_peer=False), repeats)
    dist.destroy_process_group()
    return found


class Pair:
    """The native engine, and transformers' model with the same random weights."""

    def __init__(
        self,
        architecture: ArchitectureConfig,
        with_peer: bool,
        peer: Any = None,
        dtype: torch.dtype = torch.float32,
        rows: int = ROWS,
    ) -> None:
        """Build both.

        with_peer: whether `race` also measures transformers
        peer:      transformers' model of this architecture and dtype; None = a random Llama
        rows:      most sequences that are generated at once
        """
        # Megatron may be imported after the device's set-up only.
        from mindspeed_rlxf.device import megatron_versions
        from mindspeed_rlxf.rollout.native import NativeRollout
        from mindspeed_rlxf.rollout.weights import OwnWeights

        megatron_versions.apply_patches()
        self.with_peer, self.threads, self.rows = with_peer, dict[str, int](), rows
        self.peer = random_llama(architecture) if peer is None else peer
        self.peer.eval()
        self.engine = NativeRollout(OwnWeights(architecture, 1, dtype, SEED), max_rows=rows)
        named = dict(self.peer.named_parameters())  # a tied weight once
        self.engine.update_weights(((name, p.data) for name, p in named.items()), 0)
        self.engine.wake()
        self.vocab = architecture.vocab_size

    def prompts(self, count: int) -> np.ndarray:
        """Return random prompts [count, 64] int64, the same in every call."""
        return np.random.default_rng(SEED).integers(1, self.vocab, (count, 64))

    def ours(self, lengths: Sequence[int]) -> int:
        """Generate responses of these lengths with the native engine; return the sum of tokens."""
        return sum(len(result.tokens) for result in self.responses(lengths))

    def responses(self, lengths: Sequence[int]) -> list[Any]:
        """Generate responses of these lengths with the native engine."""
        from mindspeed_rlxf.rollout.rollout_engine import GenerationRequest
        from mindspeed_rlxf.rollout.sampling import SamplingSettings

        prompts = self.prompts(len(lengths))
        asked = [
            GenerationRequest(i, i, prompts[i], SamplingSettings(True, 1.0, 0, 1.0, 0, n, ()), SEED)
            for i, n in enumerate(lengths)
        ]
        return sorted(self.engine.generate(asked), key=lambda result: result.place)

    def theirs(self, lengths: Sequence[int]) -> int:
        """Generate responses of these lengths with transformers, `rows` at a time.

        Each batch runs until its longest response ends. Returns the number of tokens.
        """
        prompts, where = torch.from_numpy(self.prompts(len(lengths))), device.current_device()
        for start in range(0, len(lengths), self.rows):
            batch, wanted = prompts[start : start + self.rows], lengths[start : start + self.rows]
            criteria = StoppingCriteriaList([AtLengths(64, wanted, where)])
            self.peer.generate(
                batch.to(where), attention_mask=torch.ones_like(batch).to(where),
                stopping_criteria=criteria, max_new_tokens=max(wanted), do_sample=True, top_k=0,
            )  # fmt: skip
        device.synchronize()
        return sum(lengths)

    def race(self, lengths: Sequence[int], repeats: int) -> dict[str, Any]:
        """Measure both engines in turn; return median seconds, and transformers' over ours."""
        sides: dict[str, Callable[[Sequence[int]], int]] = {"ours": self.ours}
        if self.with_peer:
            sides["transformers"] = self.theirs
        for name, generate in sides.items():
            if name not in self.threads:
                self.threads[name] = best_threads(lambda run=generate: run([24] * ROWS))
        times: dict[str, list[float]] = {name: [] for name in sides}
        busy: dict[str, list[float]] = {name: [] for name in sides}
        for _ in range(repeats):
            for name, generate in sides.items():
                torch.set_num_threads(self.threads[name])
                started, began = time.perf_counter(), time.process_time()
                assert generate(lengths) == sum(lengths)
                times[name].append(time.perf_counter() - started)
                busy[name].append(time.process_time() - began)
        medians = {name: statistics.median(all_s) for name, all_s in times.items()}
        found: dict[str, Any] = {"tokens": sum(lengths), "threads": dict(self.threads)}
        found |= {f"{name}_s": round(all_s, 3) for name, all_s in medians.items()}
        cpu = {name: statistics.median(all_s) for name, all_s in busy.items()}
        found |= {f"{name}_cpu_s": round(all_s, 3) for name, all_s in cpu.items()}
        if self.with_peer:
            found["ratio"] = round(medians["transformers"] / medians["ours"], 2)
            found["cpu_ratio"] = round(cpu["transformers"] / cpu["ours"], 2)
        return found


def random_llama(a: ArchitectureConfig) -> Any:
    """Make transformers' model with random weights, fp32, on the device."""
    torch.manual_seed(0)
    config = LlamaConfig(
        num_hidden_layers=a.num_layers,
        hidden_size=a.hidden_size,
        intermediate_size=a.ffn_hidden_size,
        num_attention_heads=a.num_attention_heads,
        num_key_value_heads=a.kv_heads,
        vocab_size=a.vocab_size,
        max_position_embeddings=a.max_position_embeddings,
        tie_word_embeddings=True,
        rms_norm_eps=a.norm_epsilon,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=0,
    )
    llama: Any = LlamaForCausalLM._from_config(config, attn_implementation="sdpa")
    return llama.to(device.current_device(), torch.float32)


class AtLengths(StoppingCriteria):
    """Ends each row at its own number of new tokens."""

    def __init__(self, prompt: int, lengths: Sequence[int], where: torch.device) -> None:
        """prompt: tokens of each prompt; lengths: new tokens of each row"""
        self.ends = torch.tensor(lengths, device=where) + prompt

    def __call__(self, input_ids: torch.Tensor, scores: Any, **_: Any) -> torch.Tensor:
        return input_ids.shape[1] >= self.ends


def best_threads(run: Callable[[], Any]) -> int:
    """Run with one thread and with all cores; return the faster number of threads."""
    found: dict[int, float] = {}
    for threads in sorted({1, os.cpu_count() or 1}):
        torch.set_num_threads(threads)
        run()
        times = []
        for _ in range(3):
            started = time.perf_counter()
            run()
            times.append(time.perf_counter() - started)
        found[threads] = min(times)
    return min(found, key=lambda threads: found[threads])


class Counted(TorchDispatchMode):
    """Counts the operators that reach the device's kernels, views included."""

    def __init__(self) -> None:
        super().__init__()
        self.operators = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with self:  # what an operator is made of, where it has no kernel of its own
            parts = func.decompose(*args, **(kwargs or {}))
        if parts is not NotImplemented:
            return parts
        self.operators += 1
        return func(*args, **(kwargs or {}))


def step_cost(pair: Pair, repeats: int) -> dict[str, float]:
    """Return the CPU milliseconds and the operators of one decode step, with one thread."""
    torch.set_num_threads(1)

    def took(new_tokens: int) -> float:
        started = time.process_time()  # other programs of the machine do not count
        pair.ours([new_tokens] * ROWS)
        return time.process_time() - started

    def operators(new_tokens: int) -> int:
        with Counted() as counted:
            pair.ours([new_tokens] * ROWS)
        return counted.operators

    took(8)
    times = [(took(40) - took(8)) / 32 for _ in range(repeats)]
    count = (operators(40) - operators(8)) / 32
    return {"host_ms": round(1000 * statistics.median(times), 2), "operators": round(count, 1)}


def measure_baseline(arguments: argparse.Namespace) -> dict[str, Any]:
    """Measure another checkout with this script, in a process of its own."""
    words = ["--device", arguments.device.value, "--parts", arguments.parts, "--ours-only"]
    words += ["--repeats", str(arguments.repeats)]
    done = subprocess.run(
        [sys.executable, __file__, *words, *(["--quick"] if arguments.quick else [])],
        env={**os.environ, "PYTHONPATH": str(arguments.baseline.resolve())},
        stdout=subprocess.PIPE, check=True, text=True,
    )  # fmt: skip
    return dict(json.loads(done.stdout.splitlines()[-1]))


def compare(found: dict[str, Any], baselines: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the mean of each figure of the baseline, and the ratio found / baseline."""
    compared: dict[str, Any] = {}
    for part, figures in (("cost", ("host_ms", "operators")), ("equal", ("ours_s",)),
                          ("mix", ("ours_s",))):  # fmt: skip
        for figure in figures if part in found else ():
            was = statistics.mean(each[part][figure] for each in baselines)
            name = f"{part}_{figure}"
            compared |= {name: round(was, 3), f"{name}_ratio": round(found[part][figure] / was, 3)}
    return compared


if __name__ == "__main__":
    main()
