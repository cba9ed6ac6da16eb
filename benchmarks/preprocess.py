"""Measure the seconds to preprocess GSM8K's 7,473 rows with two workers, and CPU time per row.

Prints one JSON line. Measured beside it: the tokenizer alone on the same texts in one batch, in as
many processes at once, since cores that share their caches are slower together. The time per row is
CPU time of all processes, so that other load of the machine does not count. It is the difference
between nine times the rows and the rows once, which leaves the start out.

    python benchmarks/preprocess.py [--data FOLDER_OF_GSM8K]
"""

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from multiprocessing import get_context
from pathlib import Path

os.environ["TOKENIZERS_PARALLELISM"] = "false"

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

ROOT = Path(__file__).resolve().parents[1]
DATA = Path(os.environ.get("RLXF_DATA", ROOT.parent / "shared" / "data")) / "gsm8k"
WORKERS, COPIES, VOCAB = 2, 9, 8192


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, default=DATA, help="folder with train.jsonl")
    rows_file = parser.parse_args().data / "train.jsonl"
    lines = rows_file.read_text(encoding="utf-8").splitlines()
    texts = [json.loads(line)["question"] for line in lines]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        train_tokenizer(texts).save_pretrained(folder / "tokenizer")
        with get_context("spawn").Pool(WORKERS) as pool:
            peer_s = max(pool.starmap(tokenizing_s, [(folder / "tokenizer", texts)] * WORKERS))
        once, once_cpu_s = command(folder, rows_file, 1)
        many, many_cpu_s = command(folder, rows_file, COPIES)
    row_s = (many_cpu_s - once_cpu_s) / ((COPIES - 1) * len(texts))
    print(
        json.dumps(
            {
                "benchmark": "preprocess",
                "rows": len(texts),
                "workers": WORKERS,
                "cores": os.cpu_count(),
                "whole_command_s": round(once, 2),
                f"whole_command_{COPIES}_times_the_rows_s": round(many, 2),
                "rows_per_cpu_s": round(1 / row_s),
                "tokenizer_rows_per_cpu_s": round(len(texts) / peer_s),
                "ratio_to_tokenizer": round(row_s * len(texts) / peer_s, 2),
            }
        )
    )


def train_tokenizer(texts: list[str]) -> PreTrainedTokenizerFast:
    """Train a byte-level BPE tokenizer of VOCAB tokens on texts."""
    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB,
        special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    core.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=core, eos_token="<|endoftext|>")


def tokenizing_s(folder: Path, texts: list[str]) -> float:
    """Return the CPU seconds to tokenize all texts in one batch, the best of ten.

    folder: of the tokenizer
    """
    tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)
    seconds = []
    for _ in range(10):
        started = time.process_time()
        tokenizer(texts)
        seconds.append(time.process_time() - started)
    return min(seconds)


def command(folder: Path, rows_file: Path, copies: int) -> tuple[float, float]:
    """Run preprocess_data.py; return its wall seconds and the CPU seconds of all its processes.

    copies: how often the rows are given
    """
    used = children_cpu_s()
    started = time.monotonic()
    subprocess.run(
        [
            sys.executable, str(ROOT / "preprocess_data.py"),
            "--input", *[str(rows_file)] * copies,
            "--tokenizer-name-or-path", str(folder / "tokenizer"),
            "--output-prefix", str(folder / f"{copies}" / "gsm8k"),
            "--prompt-type", "qwen",
            "--map-keys", '{"prompt": "question"}',
            "--workers", str(WORKERS),
            "--log-interval", "1000000",
        ],
        check=True,
        stdout=subprocess.DEVNULL,
    )  # fmt: skip
    return time.monotonic() - started, children_cpu_s() - used


def children_cpu_s() -> float:
    """Return the CPU seconds of all child processes that have ended."""
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


if __name__ == "__main__":
    main()
