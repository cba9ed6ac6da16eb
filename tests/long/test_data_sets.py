"""From raw rows of four data sets to three iterations of PPO with a reward that differs.

The policy is a small Llama that was taught to give one of a few answers at random.
"""

import random
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from transformers import LlamaConfig, LlamaForCausalLM

from mindspeed_rlxf.config.schema import DataConfig
from mindspeed_rlxf.data.prompts import load_prompts
from tests import raw_rows
from tests.processes import ROOT, read_lines, read_metrics, run_python
from tests.unit.data.byte_tokenizer import byte_tokenizer

pytestmark = pytest.mark.long

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
STEPS, MAX_NEW_TOKENS, IGNORED = 80, 16, -100
SCRIPTS = ROOT / "examples"


def make_policy(folder: Path, file: Path, answers: Sequence[str]) -> Path:
    """A folder with a policy that answers the prompts of a file at random, and its tokenizer."""
    tokenizer = byte_tokenizer(eos="<|im_end|>")
    tokenizer.chat_template = CHATML
    tokenizer.save_pretrained(folder)
    torch.manual_seed(1)
    sizes = {"vocab_size": len(tokenizer), "hidden_size": 64, "intermediate_size": 128}
    layers = {"num_hidden_layers": 2, "num_attention_heads": 4, "max_position_embeddings": 1024}
    model = LlamaForCausalLM(LlamaConfig(**sizes, **layers, initializer_range=0.06))
    data = DataConfig(train_files=(str(file),))
    prompts = [p.token_ids.tolist() for p in load_prompts(str(file), tokenizer, data, 512)]
    rng, optimizer = random.Random(1), torch.optim.AdamW(model.parameters(), lr=5e-3)
    for _ in range(STEPS):
        pairs = [(rng.choice(prompts), rng.choice(answers)) for _ in range(8)]
        rows = [
            [*prompt, *tokenizer(f"{answer}<|im_end|>")["input_ids"]] for prompt, answer in pairs
        ]
        width = max(map(len, rows))
        ids = torch.tensor([row + [0] * (width - len(row)) for row in rows])
        target = ids.clone()
        for labels, (prompt, _), row in zip(target, pairs, rows, strict=True):
            labels[: len(prompt)] = labels[len(row) :] = IGNORED
        optimizer.zero_grad()
        logits = model(ids).logits[:, :-1].flatten(0, 1)
        F.cross_entropy(logits, target[:, 1:].flatten()).backward()
        optimizer.step()
    model.save_pretrained(folder)
    return folder


def train(policy: Path, output: Path, file: Path, *more: str) -> list[dict[str, float]]:
    """Three iterations of PPO on the prompts of a file; the metrics of each."""
    roles = ("actor_rollout", "ref", "critic")
    changes = {
        "training.output_dir": output, "training.train_iters": 3, "training.global_batch_size": 32,
        "training.seq_length": 640, "training.tokenizer_name_or_path": policy,
        **{f"{role}.model": "auto" for role in roles}, **{f"{role}.load": policy for role in roles},
        **{f"{role}.micro_batch_size": 4 for role in roles}, "actor_rollout.max_prompt_length": 512,
        "actor_rollout.max_new_tokens": MAX_NEW_TOKENS, "actor_rollout.ppo_mini_batch_size": 16,
        "critic.critic_mini_batch_size": 16, "data.train_files": file, "data.val_files": "[]",
        "data.ground_truth_key": "reward_model.ground_truth", "validation.interval": 0,
        "resource_pool.main": 1, "device.kind": "cpu", "runtime.address": "local",
        "logging.samples": "all",
    }  # fmt: skip
    keys = [f"{key}={value}" for key, value in changes.items()]
    run_python("ray_gpt.py", "--config-name", "ppo_trainer_tiny", *keys, *more)
    return read_metrics(output)


def assert_differs(metrics: list[dict[str, float]], output: Path) -> None:
    """In each iteration the score differs between samples, and so the policy learns."""
    assert len(metrics) == 3
    for line in metrics:
        assert line["critic/score/max"] > line["critic/score/min"]
        assert line["actor/grad_norm"] > 0
    scores = [row["score"] for row in read_lines(output / "samples.jsonl")]
    assert len(scores) == 96 and len(set(scores)) > 1


@pytest.mark.parametrize(
    ("script", "write", "answers", "runtime"),
    [
        ("gsm8k", raw_rows.write_gsm8k, ["#### 4", "#### 5"], "ray"),
        ("math_dataset", raw_rows.write_math, ["\\boxed{5}", "\\boxed{6}"], "local"),
        ("hellaswag", raw_rows.write_hellaswag, [*"ABCD"], "local"),
    ],
)
def test_ppo_trains_on_the_rule_of_the_data_set(script, write, answers, runtime, tmp_path):
    raw = write(tmp_path / "raw")
    run_python(f"{SCRIPTS}/data_preprocess/{script}.py", "--input", raw, "--output", tmp_path)
    output, file = tmp_path / "run", tmp_path / "train.parquet"
    policy = make_policy(tmp_path / "policy", file, answers)
    metrics = train(policy, output, file, f"runtime.kind={runtime}")
    assert_differs(metrics, output)
    assert {line["critic/score/max"] for line in metrics} == {1.0}  # some answers are right


def test_ppo_trains_on_a_reward_model_of_the_pairs_of_hh_rlhf(tmp_path: Path) -> None:
    raw = raw_rows.write_hh(tmp_path / "raw")
    run_python(SCRIPTS / "data_preprocess/full_hh_rlhf.py", "--input", raw, "--output", tmp_path)
    file = tmp_path / "rl" / "train.parquet"
    policy = make_policy(tmp_path / "policy", file, ["Yes, gladly!", "No. Go away."])
    pairs = {f"--{split}": tmp_path / "rm" / f"{split}.parquet" for split in ("train", "test")}
    given = {"--model": policy, "--output": tmp_path / "reward", "--epochs": 8, "--lr": 5e-3}
    given |= {"--batch-size": 8, "--max-response-length": MAX_NEW_TOKENS, **pairs}
    words = [word for pair in given.items() for word in pair]
    printed = run_python(SCRIPTS / "reward_model/train_reward_model.py", *words)
    assert '{"held_out": 16, "accuracy": 1.0}' in printed
    output = tmp_path / "run"
    metrics = train(
        policy, output, file, "runtime.kind=local", "reward.kind=model", "reward.model=auto",
        f"reward.load={tmp_path / 'reward'}", "data.system_prompt=Be kind.",
        "actor_rollout.stop_strings=[away]",
    )  # fmt: skip
    assert_differs(metrics, output)
    rows = read_lines(output / "samples.jsonl")
    assert all("system\nBe kind." in row["prompt"] for row in rows)
    texts = {row["response"]: row["score"] for row in rows}
    assert not any("away." in text for text in texts) and any("away" in text for text in texts)
    polite = [score for text, score in texts.items() if text.startswith("Yes, gladly")]
    rude = [score for text, score in texts.items() if text.startswith("No. Go away")]
    assert min(polite) > max(rude)
