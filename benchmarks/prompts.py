"""Measure the resident memory with the prompts of a parquet file: many rows, and a tenth of them.

Prints one JSON line. Each size is measured in a process of its own: it opens the file as a run does
(checks, template, tokenizer), then draws one epoch at random and reads the prompts that it drew.
Only the sampler's order grows with the file, by 8 bytes a row. `rows_held_mib` is the memory of
all rows as a list of Python objects, estimated from 10,000 rows.

    python benchmarks/prompts.py [--rows 1000000] [--chat]
"""

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from mindspeed_rlxf.config.schema import DataConfig
from mindspeed_rlxf.data.prompts import load_prompts
from mindspeed_rlxf.data.sampler import PromptSampler

ROOT = Path(__file__).resolve().parents[1]
WRITTEN_AT_ONCE, SAMPLE = 10_000, 10_000
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "<|im_start|>assistant\n"
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--chat", action="store_true", help="prompts are chats, not text")
    parser.add_argument("--measure", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.measure:
        print(json.dumps(measure(arguments.measure, arguments.rows)))
        return
    few, many = (measured(rows, arguments.chat) for rows in (arguments.rows // 10, arguments.rows))
    print(json.dumps({"benchmark": "prompts", "chat": arguments.chat, "few": few, "many": many}))


def measured(rows: int, chat: bool) -> dict[str, Any]:
    """Write a temporary file of `rows` prompts; measure it in another process."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "rows.parquet")
        write(file, rows, chat)
        command = [sys.executable, __file__, "--measure", str(file), "--rows", str(rows)]
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "TMPDIR": folder}
        done = subprocess.run(command, env=environment, check=True, stdout=subprocess.PIPE)
        found: dict[str, Any] = json.loads(done.stdout)
        return {"rows": rows, "file_mib": round(file.stat().st_size / 2**20), **found}


def write(file: Path, rows: int, chat: bool) -> None:
    """Write a parquet file in one row group, the worst case: a reader may load a whole column.

    chat: prompts are lists of messages, not text
    """

    def made(place: int) -> dict[str, Any]:
        text = f"Problem {place}: " + " ".join(str(place * k % 99_991) for k in range(3, 33))
        return {
            "data_source": "openai/gsm8k",
            "prompt": [{"role": "user", "content": text}] if chat else text,
            "reward_model": {"style": "rule", "ground_truth": str(place)},
            "extra_info": {"split": "train", "index": place},
        }

    def batches() -> Iterator[pa.RecordBatch]:
        for start in range(0, rows, WRITTEN_AT_ONCE):
            places = range(start, min(rows, start + WRITTEN_AT_ONCE))
            yield pa.RecordBatch.from_pylist([made(place) for place in places])

    table = pa.Table.from_batches(batches())
    pq.write_table(table, file, row_group_size=rows, use_dictionary=False)


def make_tokenizer() -> Any:
    """Make a tokenizer with one id per byte, and a chat template."""
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    tokens = [*special, *sorted(pre_tokenizers.ByteLevel.alphabet())]
    core = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=[]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core, eos_token=special[0], additional_special_tokens=special[1:]
    )
    tokenizer.chat_template = TEMPLATE
    return tokenizer


def measure(file: str, rows: int) -> dict[str, Any]:
    """Load the prompts and draw one epoch in this process; return memory and times.

    Memory is above that of the process before it opened the file.
    """
    data = DataConfig(train_files=[file], ground_truth_key="reward_model.ground_truth")
    tokenizer = make_tokenizer()
    before, started = resident_mib(), time.monotonic()
    prompts = load_prompts(file, tokenizer, data, 1024)
    load_s, loaded = time.monotonic() - started, resident_mib()
    sampler = PromptSampler(rows, 1024, 1, shuffle=True)
    started, drawn = time.monotonic(), 0
    while drawn < rows:
        drawn += sum(prompts[i].index == i for i in sampler.next_batch())
    draw_s, drawn_mib = time.monotonic() - started, resident_mib()
    peak = peak_mib()
    held = prompts[:SAMPLE]
    held_mib = (resident_mib() - drawn_mib) * rows / len(held)
    return {
        "after_load_mib": round(loaded - before, 1),
        "after_epoch_mib": round(drawn_mib - before, 1),
        "peak_mib": round(peak - before, 1),
        "rows_held_mib": round(held_mib),
        "load_rows_per_s": round(rows / load_s),
        "draw_us": round(draw_s / drawn * 1e6, 1),
    }


def resident_mib() -> float:
    return _status_mib("VmRSS")


def peak_mib() -> float:
    return _status_mib("VmHWM")


def _status_mib(name: str) -> float:
    """Return a field of this process's /proc status, in MiB."""
    text = Path("/proc/self/status").read_text(encoding="ascii")
    found = re.search(rf"{name}:\s+(\d+) kB", text)
    assert found, f"/proc/self/status has {name}"
    return int(found[1]) / 1024


if __name__ == "__main__":
    main()
