"""What the stages of `on_device.py` are and how much they compute."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .table import Row

ROOT = Path(__file__).resolve().parents[2]
GIB = 1024**3

Figures = dict[str, Any]


@dataclass(frozen=True)
class Sizes:
    """How much the stages compute.

    Attributes:
        shapes: name -> sizes of the random model, by the names of config.json.
        update: rows, tokens of a prompt and of a response in an update.
        micro_batches: tokens of a micro-batch to choose from: the first that fits by the plan.
        decode: rows and new tokens of each.
        grpo: prompts, samples of each, tokens of a prompt, mean tokens of a response.
        repeats: measurements, of which the median counts.
        resume_iterations: iterations of the run that is killed half-way.
        bring_up: stages of `bring_up.py`, and those with a real model.
    """

    shapes: dict[str, dict[str, int]]
    update: tuple[int, int, int]
    micro_batches: tuple[int, ...]
    decode: tuple[int, int]
    grpo: tuple[int, int, int, int]
    repeats: int
    resume_iterations: int
    bring_up: tuple[str, str]


REAL_STAGES = "real-forward,real-generate,real-update,real-resume"
QWEN = {"num_key_value_heads": 2, "vocab_size": 151936, "max_position_embeddings": 4096}
FULL = Sizes(
    shapes={
        "1.5b": {  # Qwen2.5-1.5B
            **QWEN, "num_hidden_layers": 28, "hidden_size": 1536, "intermediate_size": 8960,
            "num_attention_heads": 12,
        },
        "0.5b": {  # Qwen2.5-0.5B
            **QWEN, "num_hidden_layers": 24, "hidden_size": 896, "intermediate_size": 4864,
            "num_attention_heads": 14,
        },
    },
    update=(16, 256, 768),
    micro_batches=(16384, 8192, 4096, 2048),
    decode=(64, 256),
    grpo=(8, 8, 512, 512),
    repeats=3,
    resume_iterations=20,
    bring_up=("import,patch,collective,forward,update,generate,ppo", REAL_STAGES),
)  # fmt: skip
TOY = {  # heads of 32, the smallest of vLLM on a CPU
    "num_hidden_layers": 2, "hidden_size": 128, "intermediate_size": 64, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 16384, "max_position_embeddings": 128,
}  # fmt: skip
QUICK = Sizes(
    shapes={"1.5b": {**TOY, "num_hidden_layers": 3}, "0.5b": TOY},
    update=(4, 8, 24),
    micro_batches=(64,),
    decode=(4, 8),
    grpo=(2, 2, 8, 8),
    repeats=1,
    resume_iterations=3,
    bring_up=("import", "real-forward"),
)


@dataclass(frozen=True)
class Settings:
    """What every stage gets.

    Attributes:
        device: cpu, cuda or npu.
        threads: CPU threads of a process.
        folder: for logs and lines.
        scratch: for models and runs, which are removed at the end.
        trl: folder with TRL, if it is measured too.
        vllm: interpreter that has vLLM, if it is measured too.
        start: how processes are started, by the names of `multiprocessing`.
    """

    device: str
    sizes: Sizes
    threads: int
    folder: Path
    scratch: Path
    trl: Path | None
    vllm: Path | None
    start: str


@dataclass(frozen=True)
class Stage:
    """A measurement with a process of its own.

    Attributes:
        name: also of its log and in `--stages`.
        limit_s: seconds after which it is ended, of a run of nine minutes.
        run: returns the figures, which become a JSON line.
        row: makes a row of the table from the line.
    """

    name: str
    limit_s: float
    run: Callable[[Settings], Figures]
    row: Callable[[Figures], Row]
