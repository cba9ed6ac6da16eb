r"""Train a reward model on response pairs, so the better one gets the higher score.

    python examples/reward_model/train_reward_model.py --model FOLDER --output FOLDER \
        --train data/full_hh_rlhf/rm/train.parquet --test data/full_hh_rlhf/rm/test.parquet

Starts from any Hugging Face causal model in safetensors, on one device. The loss is Bradley and
Terry's: -log sigmoid(score of the better response - score of the worse one), each read at the last
token. PPO loads the result with `reward.kind=model reward.load=FOLDER`. The same command resumes an
interrupted training from its last saved state.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from pairs import Pair, Pairs
from torch import Tensor
from transformers import AutoModelForSequenceClassification

from mindspeed_rlxf.config.problems import Problem, UserError
from mindspeed_rlxf.data.sampler import PromptSampler
from mindspeed_rlxf.data.tokenizer import load_tokenizer

STATE = "state.pt"
FREE = ("test", "micro_batch_size", "device", "save_steps")  # arguments that a resume may change
WARMUP = 0.05  # share of the steps in which the learning rate rises


def main(argv: Sequence[str] | None = None) -> int:
    """Train a reward model; return the exit code."""
    arguments = _parse(argv)
    try:
        train(arguments)
    except UserError as error:
        for problem in error.problems:
            print(f"error: {problem}", file=sys.stderr)
        return 2
    return 0


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", required=True, help="folder of a causal model of Hugging Face")
    parser.add_argument("--train", required=True, help="file of pairs")
    parser.add_argument("--test", required=True, help="file of pairs that are not trained on")
    parser.add_argument("--output", type=Path, required=True, help="folder of the reward model")
    parser.add_argument("--epochs", type=float, default=1.0)
    parser.add_argument("--batch-size", type=int, default=64, help="pairs per optimizer step")
    parser.add_argument("--micro-batch-size", type=int, default=4, help="pairs per forward pass")
    parser.add_argument("--lr", type=float, default=1e-5)
    parser.add_argument("--max-prompt-length", type=int, default=1024, help="tokens")
    parser.add_argument("--max-response-length", type=int, default=512, help="tokens")
    parser.add_argument("--bf16", action="store_true", help="compute in bf16; weights stay fp32")
    parser.add_argument("--device", default="cpu", help="cpu, cuda or npu")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--save-steps", type=int, default=200, help="steps between saved states")
    return parser.parse_args(argv)


def train(arguments: argparse.Namespace) -> None:
    """Train, print the accuracy on the held-out pairs, and write the model.

    Raises UserError for an existing output, and for an unusable model or pairs.
    """
    if arguments.output.exists():
        rule = "must not exist: an existing folder is taken for a finished model"
        raise UserError(Problem("--output", rule, arguments.output, "remove it, or name another"))
    tokenizer = load_tokenizer(arguments.model, "--model")
    if tokenizer.eos_token_id is None:
        rule = "must have a tokenizer with an EOS token"
        remedy = "set eos_token in its tokenizer_config.json"
        raise UserError(Problem("--model", rule, arguments.model, remedy))
    lengths = arguments.max_prompt_length, arguments.max_response_length
    pairs, held_out = (
        Pairs(file, tokenizer, *lengths) for file in (arguments.train, arguments.test)
    )
    model = new_model(arguments.model, tokenizer).to(arguments.device)
    print(f"{len(pairs)} pairs, {len(held_out)} held out", flush=True)
    if num_equal := pairs.num_equal + held_out.num_equal:
        longest = f"--max-response-length={arguments.max_response_length}"
        print(f"{num_equal} pairs dropped: equal responses within {longest}", flush=True)
    learn(model, pairs, arguments)
    accuracy = measure(model, held_out, arguments)
    save(model, tokenizer, arguments.output)
    shutil.rmtree(_work_folder(arguments.output), ignore_errors=True)
    print(json.dumps({"held_out": len(held_out), "accuracy": round(accuracy, 4)}), flush=True)


def new_model(folder: str, tokenizer: Any) -> Any:
    """Load the base model in fp32 with a score head of zeros. Raises UserError."""
    try:
        model = AutoModelForSequenceClassification.from_pretrained(
            folder,
            num_labels=1,
            local_files_only=True,
            trust_remote_code=False,
            use_safetensors=True,
            torch_dtype=torch.float32,
        )
    except (OSError, ValueError) as error:
        rule = f"must be a causal model in safetensors ({str(error).splitlines()[0]})"
        raise UserError(Problem("--model", rule, folder, "give another folder")) from error
    torch.nn.init.zeros_(model.score.weight)
    eos = tokenizer.eos_token_id
    model.config.pad_token_id = eos if tokenizer.pad_token_id is None else tokenizer.pad_token_id
    model.config.use_cache = False
    return model


def learn(model: Any, pairs: Pairs, arguments: argparse.Namespace) -> None:
    """Train for all epochs, from the saved state if there is one; print every step.

    Saves the state after every --save-steps steps.
    """
    steps = max(1, round(arguments.epochs * len(pairs) / arguments.batch_size))
    optimizer = torch.optim.AdamW(model.parameters(), lr=arguments.lr, weight_decay=0.0)
    sampler = PromptSampler(len(pairs), arguments.batch_size, arguments.seed, shuffle=True)
    state = _work_folder(arguments.output) / STATE
    given = {key: str(value) for key, value in vars(arguments).items() if key not in FREE}
    first = _resume(state, given, model, optimizer, sampler)
    model.train()
    for step in range(first, steps):
        for group in optimizer.param_groups:
            group["lr"] = arguments.lr * rate_factor(step, steps)
        batch = [pairs[index] for index in sampler.next_batch()]
        loss, right = _step(model, optimizer, batch, arguments)
        print(f"step {step + 1}/{steps} loss {loss:.4f} accuracy {right:.3f}", flush=True)
        if (step + 1) % arguments.save_steps == 0 and step + 1 < steps:
            _save_state(state, given, model, optimizer, sampler, step + 1)


def rate_factor(step: int, steps: int) -> float:
    """Return the learning rate's factor: it rises for WARMUP, and falls to a tenth."""
    warmup = max(1, round(WARMUP * steps))
    return min((step + 1) / warmup, 1.0 - 0.9 * step / steps)


def _step(
    model: Any, optimizer: torch.optim.Optimizer, batch: list[Pair], arguments: argparse.Namespace
) -> tuple[float, float]:
    """Do one optimizer step; return the mean loss and the fraction of pairs in the right order."""
    optimizer.zero_grad()
    total, right = 0.0, 0
    for start in range(0, len(batch), arguments.micro_batch_size):
        margins = compare(model, batch[start : start + arguments.micro_batch_size], arguments.bf16)
        loss = -F.logsigmoid(margins).sum() / len(batch)
        loss.backward()
        total += float(loss)
        right += int((margins > 0).sum())
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    return total, right / len(batch)


def compare(model: Any, batch: list[Pair], bf16: bool = False) -> Tensor:
    """Return by how much the better response scores higher, [pairs] fp32."""
    sequences = [pair.chosen for pair in batch] + [pair.rejected for pair in batch]
    lengths = torch.tensor([len(ids) for ids in sequences])
    width = int(lengths.max())
    padded = torch.tensor([ids + [0] * (width - len(ids)) for ids in sequences])
    mask = torch.arange(width)[None, :] < lengths[:, None]
    device = model.device
    inputs = {"input_ids": padded.to(device), "attention_mask": mask.to(device, torch.long)}
    with torch.autocast(device.type, torch.bfloat16, enabled=bf16):
        hidden = model.base_model(**inputs).last_hidden_state.float()
    last = hidden[torch.arange(len(sequences), device=device), (lengths - 1).to(device)]
    better, worse = model.score(last)[:, 0].chunk(2)
    return better - worse


@torch.no_grad()
def measure(model: Any, pairs: Pairs, arguments: argparse.Namespace) -> float:
    """Return the fraction of pairs whose better response scores higher; ties do not count."""
    model.eval()
    right, size = 0, arguments.micro_batch_size
    for start in range(0, len(pairs), size):
        batch = [pairs[index] for index in range(start, min(len(pairs), start + size))]
        right += int((compare(model, batch, arguments.bf16) > 0).sum())
    return right / len(pairs)


def save(model: Any, tokenizer: Any, output: Path) -> None:
    """Write model and tokenizer to another folder and rename it, so `output` is complete."""
    unfinished = _work_folder(output) / "model"
    shutil.rmtree(unfinished, ignore_errors=True)
    model.save_pretrained(unfinished)
    tokenizer.save_pretrained(unfinished)
    os.replace(unfinished, output)


def _work_folder(output: Path) -> Path:
    """Return the folder beside the output for saved states and an unfinished model."""
    return output.with_name(f".{output.name}.partial")


def _save_state(
    file: Path,
    given: dict[str, str],
    model: Any,
    optimizer: torch.optim.Optimizer,
    sampler: PromptSampler,
    step: int,
) -> None:
    """Write the training state atomically; `given` are arguments which a resume must not change."""
    file.parent.mkdir(parents=True, exist_ok=True)
    unfinished = file.with_suffix(".new")
    tree = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "given": given}
    with unfinished.open("wb") as stream:
        torch.save({**tree, "sampler": sampler.state_dict(), "step": step}, stream)
        stream.flush()
        os.fsync(stream.fileno())
    unfinished.replace(file)


def _resume(
    file: Path,
    given: dict[str, str],
    model: Any,
    optimizer: torch.optim.Optimizer,
    sampler: PromptSampler,
) -> int:
    """Load the saved state, if there is one; return the number of finished steps.

    Raises UserError if an argument in `given` differs from the saved one.
    """
    if not file.exists():
        return 0
    tree = torch.load(file, map_location="cpu", weights_only=True)
    for key, value in given.items():
        if (saved := tree["given"].get(key)) != value:
            rule = f"must be {saved}, as in the training that has saved {file}"
            remedy = f"use that value to resume, or remove {file.parent} to start anew"
            raise UserError(Problem(f"--{key.replace('_', '-')}", rule, value, remedy))
    sampler.load_state_dict(tree["sampler"])
    model.load_state_dict(tree["model"])
    optimizer.load_state_dict(tree["optimizer"])
    print(f"resuming after step {tree['step']}", flush=True)
    return int(tree["step"])


if __name__ == "__main__":
    sys.exit(main())
