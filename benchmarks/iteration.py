"""Measure the seconds of a PPO iteration of a tiny model, and of the start of a run.

Batch 64, prompt and response 16 tokens, four roles with models on one pool. Prints one JSON line.
Measured beside it in the same run: the forward and backward passes of one iteration in plain
transformers, without generation, roles or runtime.

    python benchmarks/iteration.py [--iterations 12] [--devices 2] [--runtime ray|local]
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM, LlamaForSequenceClassification

BATCH, PROMPT, RESPONSE, VOCAB = 64, 16, 16, 64
SHAPE = {
    "num_layers": 4,
    "hidden_size": 128,
    "ffn_hidden_size": 384,
    "num_attention_heads": 4,
    "num_query_groups": 2,
    "vocab_size": VOCAB,
    "max_position_embeddings": 64,
}
ROOT = Path(__file__).resolve().parents[1]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--iterations", type=int, default=12)
    parser.add_argument("--devices", type=int, default=2)
    parser.add_argument("--runtime", choices=["ray", "local"], default="ray")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        models = make_models(folder)
        peer_s = plain_passes(*models)
        write_inputs(folder)
        started = time.monotonic()
        lines = train(folder, arguments.iterations, arguments.devices, arguments.runtime)
        wall_s = time.monotonic() - started
    seconds = [line["metrics"]["timing/all"] for line in lines]
    warm_s = statistics.median(seconds[2:])
    print(
        json.dumps(
            {
                "benchmark": "iteration",
                "runtime": arguments.runtime,
                "devices": arguments.devices,
                "cores": os.cpu_count(),
                "torch": torch.__version__,
                "iteration_s": round(warm_s, 3),
                "first_iteration_s": round(seconds[0], 3),
                "start_to_first_iteration_s": round(wall_s - sum(seconds), 1),
                "plain_transformers_passes_s": round(peer_s, 3),
                "ratio_to_plain_passes": round(warm_s / peer_s, 2),
            }
        )
    )


def make_models(
    folder: Path, shape: dict[str, int] = SHAPE
) -> tuple[LlamaForCausalLM, LlamaForSequenceClassification]:
    """Make a random policy and a random scorer, and save both below `folder`.

    shape: sizes by Megatron's names
    """
    config = LlamaConfig(
        num_hidden_layers=shape["num_layers"],
        hidden_size=shape["hidden_size"],
        intermediate_size=shape["ffn_hidden_size"],
        num_attention_heads=shape["num_attention_heads"],
        num_key_value_heads=shape["num_query_groups"],
        vocab_size=shape["vocab_size"],
        max_position_embeddings=shape["max_position_embeddings"],
        tie_word_embeddings=True,
        rms_norm_eps=1e-5,
        pad_token_id=0,
        eos_token_id=1,
        num_labels=1,
    )
    torch.manual_seed(0)
    policy, scorer = LlamaForCausalLM(config), LlamaForSequenceClassification(config)
    policy.save_pretrained(folder / "policy")
    scorer.save_pretrained(folder / "scorer")
    return policy, scorer


def plain_passes(policy: LlamaForCausalLM, scorer: LlamaForSequenceClassification) -> float:
    """Return the median seconds of one iteration's passes, after one unmeasured.

    Old log-probs, reference, values and scores, then forward and backward of policy and critic.
    Sets torch's threads to all cores.
    """
    torch.set_num_threads(os.cpu_count() or 1)
    ids = torch.randint(2, VOCAB, (BATCH, PROMPT + RESPONSE))

    def once() -> float:
        started = time.monotonic()
        with torch.no_grad():
            for model in (policy, policy, scorer.model, scorer.model):
                model(ids)
        policy(ids).logits.logsumexp(-1).mean().backward()
        scorer.model(ids).last_hidden_state.mean().backward()
        return time.monotonic() - started

    once()
    return statistics.median(once() for _ in range(5))


def write_inputs(folder: Path, vocab: int = VOCAB, prompt_tokens: int = PROMPT) -> None:
    """Write 512 prompts of random words to train.jsonl, and a tokenizer with a token per word.

    vocab: number of tokens
    """
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = ["<pad>", "<eos>", *(f"w{i}" for i in range(vocab - 2))]
    core = Tokenizer(models.WordLevel({w: i for i, w in enumerate(words)}, unk_token="w0"))
    core.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, pad_token="<pad>", eos_token="<eos>")
    tokenizer.save_pretrained(folder / "tokenizer")
    generator = torch.Generator().manual_seed(0)
    with open(folder / "train.jsonl", "w", encoding="utf-8") as stream:
        for _ in range(512):
            ids = torch.randint(2, vocab, (prompt_tokens,), generator=generator).tolist()
            prompt = " ".join(words[i] for i in ids)
            row = {"prompt": prompt, "ground_truth": "", "data_source": "random"}
            stream.write(json.dumps(row) + "\n")


def train(
    folder: Path,
    iterations: int,
    devices: int,
    runtime: str,
    shape: dict[str, int] = SHAPE,
    bf16: bool = False,
) -> list[dict]:
    """Train in another process; return the lines of its metrics.jsonl.

    folder: with the models and inputs; gets the configuration and the run's output
    """
    name = "bf16" if bf16 else "fp32"
    role = {"micro_batch_size": 32, "load": str(folder / "scorer")}
    policy = {**role, "load": str(folder / "policy")}
    tree = {
        "model": {"bench": shape},
        "training": {
            "model": "bench",
            "train_iters": iterations,
            "bf16": bf16,
            "global_batch_size": BATCH,
            "seq_length": PROMPT + RESPONSE,
            "tokenizer_name_or_path": str(folder / "tokenizer"),
            "output_dir": str(folder / name),
        },
        "actor_rollout": {
            **policy,
            "do_sample": True,
            "min_new_tokens": RESPONSE,
            "max_prompt_length": PROMPT,
            "ppo_mini_batch_size": BATCH,
        },
        "ref": policy,
        "critic": {**role, "critic_mini_batch_size": BATCH},
        "reward": {**role, "kind": "model"},
        "data": {"train_files": str(folder / "train.jsonl")},
        "device": {"kind": "cpu"},
        "runtime": runtime,
        "placement": dict.fromkeys(("actor_rollout", "ref", "critic", "reward"), "main"),
        "resource_pool": {"main": devices},
    }
    # JSON is YAML: no need of another library here.
    (folder / "bench.yaml").write_text(json.dumps(tree), encoding="utf-8")
    command = [sys.executable, str(ROOT / "ray_gpt.py"), "--config-dir", str(folder)]
    subprocess.run([*command, "--config-name", "bench"], check=True, stdout=sys.stderr)
    text = (folder / name / "metrics.jsonl").read_text(encoding="utf-8")
    return [json.loads(line) for line in text.splitlines()]


if __name__ == "__main__":
    main()
