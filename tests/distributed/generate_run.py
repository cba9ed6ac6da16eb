"""Train, then generate with what the run left, in a process of its own.

python -m tests.distributed.generate_run MODELS OUT
"""

import json
import sys
from pathlib import Path

from tokenizers.pre_tokenizers import WhitespaceSplit

from mindspeed_rlxf.cli.generate import main as generate
from mindspeed_rlxf.cluster.local import LocalRuntime
from mindspeed_rlxf.config.enums import DeviceKind
from mindspeed_rlxf.config.lora import LoraConfig
from tests.distributed.resume_run import start
from tests.trl.record import make_tokenizer


def main(models: Path, out: Path) -> None:
    """Write runs `run` and `lora` to `out`, and a jsonl file of each command's responses."""
    tokenizer = make_tokenizer()
    tokenizer.backend_tokenizer.pre_tokenizer = WhitespaceSplit()  # so that it reads its own texts
    for folder in ("tokenizer", "lm"):  # the latter for the exported weights
        tokenizer.save_pretrained(models / folder)
    runtime = LocalRuntime(DeviceKind.CPU, timeout_s=60.0)
    run = start(runtime, models, out / "run", train_iters=2)
    lora = {"actor_rollout": {"lora": LoraConfig(rank=4), "lr": 0.05}}
    adapted = start(runtime, models, out / "lora", train_iters=1, sections=lora)
    runtime.shutdown()

    samples = [json.loads(line) for line in run.samples.read_text(encoding="utf-8").splitlines()]
    rows = [{"prompt": sample["prompt"], "ground_truth": "7"} for sample in samples]
    file = out / "prompts.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    exported = run.path / "final" / "actor_hf"
    commands = {
        "sampled": [run.checkpoints / "iter_0000001"],
        "newest": [run.path, "--greedy"],
        "exported": [exported, "--greedy", "--max-new-tokens", 16],
        "transformers": [run.path, "--greedy", "--engine", "transformers"],
        "adapters": [adapted.path, "--greedy"],
        "merged": [adapted.path / "final" / "actor_hf", "--greedy", "--max-new-tokens", 16],
    }
    for name, words in commands.items():
        whole = [*words, "--file", file, "--output", out / f"{name}.jsonl"]
        assert generate([str(word) for word in whole]) == 0, name


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
