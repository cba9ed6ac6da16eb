"""Measure the seconds of the phases of a PPO iteration on one process, in bf16 and in fp32.

Prints one JSON line.

    python benchmarks/precision.py [--hidden-size 768] [--layers 8] [--iterations 4]
"""

import argparse
import json
import os
import statistics
import tempfile
from pathlib import Path

import torch
from iteration import SHAPE, make_models, train, write_inputs

PHASES = ("all", "gen", "old_log_prob", "update_actor", "update_critic")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--hidden-size", type=int, default=768)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--iterations", type=int, default=4)
    arguments = parser.parse_args()
    width = arguments.hidden_size
    sizes = {"num_layers": arguments.layers, "hidden_size": width, "ffn_hidden_size": 3 * width}
    shape = {**SHAPE, **sizes, "num_attention_heads": 12, "num_query_groups": 4}
    seconds: dict[str, dict[str, float]] = {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        policy, _ = make_models(folder, shape)
        write_inputs(folder)
        for bf16 in (False, True):
            lines = train(folder, arguments.iterations, 1, "local", shape, bf16)
            seconds["bf16" if bf16 else "fp32"] = {
                phase: statistics.median(line["metrics"][f"timing/{phase}"] for line in lines[1:])
                for phase in PHASES
            }
    print(
        json.dumps(
            {
                "benchmark": "precision",
                "parameters_m": round(sum(p.numel() for p in policy.parameters()) / 1e6, 1),
                "cores": os.cpu_count(),
                "cpu_capability": torch.backends.cpu.get_cpu_capability(),
                "torch": torch.__version__,
                **{f"{k}_s": {p: round(s, 3) for p, s in v.items()} for k, v in seconds.items()},
                "ratio_bf16_to_fp32": {
                    phase: round(seconds["bf16"][phase] / seconds["fp32"][phase], 2)
                    for phase in PHASES
                },
            }
        )
    )


if __name__ == "__main__":
    main()
