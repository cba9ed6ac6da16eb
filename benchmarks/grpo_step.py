"""Measure the seconds of a GRPO iteration of this package and of TRL's GRPOTrainer.

Both have the same weights (sdpa), `--prompts` prompts of `--prompt` tokens with `--samples`
responses each, of half to one and a half of `--response` tokens, forced by position in the batch; a
cheap reward, no reference, one optimizer step, all samples of a prompt in one micro-batch. Old
log-probs are those of generation (TRL's are those of the update itself: no further pass either).
`apart` is this package with `share_prompts: false`. `--model` takes the weights of a Hugging Face
folder, and word sums as prompts. Each run has a process of its own with the same number of threads;
the processes take turns, and the first iteration of each is left out. `loss` and `grad_norm` are
those of one update on fixed responses, with injected advantages and old log-probs, some of whose
ratios are clipped (TRL's `loss_type` is its default, dapo: a mean over all tokens of the batch, as
here); they are measured in fp32 alone. With `--dtype bf16` weights and activations of this package
are bf16 with fp32 masters; TRL has fp32 weights under autocast. Prints one JSON line.

    python benchmarks/grpo_step.py [--device cpu|cuda|npu] [--trl FOLDER] [--size 19m|100m]
    python benchmarks/grpo_step.py --model outputs/smollm2/model --prompts 16 --response 16

`ppo_step.py` says how to install TRL into a folder.
"""

import argparse
import json
import os
import random
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

from iteration import ROOT, make_models, write_inputs
from ppo_step import (
    BASE,
    SHAPES,
    TRL_SETTINGS,
    child_seconds,
    force_lengths,
    our_tree,
    seconds_of,
    step_seconds,
)

SIDES = ("trl", "shared", "apart")
KEYS = ("device", "dtype", "prompts", "samples", "prompt", "response", "iterations", "threads")
REWARD = "def score(response, **_):\n    return len(response) % 7 / 7\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", choices=["cpu", "cuda", "npu"], default="cpu")
    parser.add_argument("--dtype", choices=["fp32", "bf16"], default="fp32")
    parser.add_argument("--size", choices=list(SHAPES), default="19m")
    parser.add_argument("--model", type=Path, help="a folder to use in place of random weights")
    for name, number in {
        "prompts": 4, "samples": 8, "prompt": 256, "response": 64, "rounds": 2, "iterations": 2,
        "threads": 2,
    }.items():  # fmt: skip
        parser.add_argument(f"--{name}", type=int, default=number)
    parser.add_argument("--trl", type=Path, help="folder with trl, if the environment lacks it")
    parser.add_argument("--child", nargs=2, metavar=("SIDE", "FOLDER"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    lengths = draw_lengths(arguments)
    if arguments.child:
        side, folder = arguments.child
        run = trl_seconds if side == "trl" else our_seconds
        print(json.dumps(run(side, lengths, Path(folder), arguments)))
        return
    with tempfile.TemporaryDirectory() as name:
        print(json.dumps(race(Path(name), lengths, arguments)))


def draw_lengths(arguments: argparse.Namespace) -> list[int]:
    """Return the response tokens at each position of the batch; sets `batch`, `micro`, `limit`."""
    arguments.batch, arguments.micro = arguments.prompts * arguments.samples, arguments.samples
    arguments.limit = 3 * arguments.response // 2
    draw = random.Random(3)
    return [draw.randint(arguments.response // 2, arguments.limit) for _ in range(arguments.batch)]


def race(folder: Path, lengths: list[int], arguments: argparse.Namespace) -> dict[str, Any]:
    """Run all sides in turn; return their median seconds and ratios."""
    import torch

    if arguments.model:
        for name in ("policy", "scorer", "tokenizer"):
            (folder / name).symlink_to(arguments.model.resolve())
        write_word_sums(folder / "train.jsonl")
    else:
        make_models(folder, SHAPES[arguments.size])
        write_inputs(folder, BASE["vocab_size"], arguments.prompt)
    seconds: dict[str, list[float]] = {side: [] for side in SIDES}
    for _ in range(arguments.rounds):
        for side, values in seconds.items():
            values += child_seconds(__file__, KEYS, arguments, side, str(folder))
    medians = {side: statistics.median(values) for side, values in seconds.items()}
    first = {side: json.loads((folder / f"{side}.json").read_text("utf-8")) for side in SIDES}
    return {
        "benchmark": "grpo_step",
        "model": str(arguments.model or arguments.size),
        "device": arguments.device,
        "dtype": arguments.dtype,
        **{key: getattr(arguments, key) for key in ("prompts", "samples", "prompt", "response")},
        "response_tokens": sum(lengths),
        "threads": arguments.threads,
        "cores": os.cpu_count(),
        "torch": torch.__version__,
        **{f"{side}_s": round(value, 2) for side, value in medians.items()},
        **{f"{o}_to_shared": round(medians[o] / medians["shared"], 2) for o in ("trl", "apart")},
        **{name: {side: first[side][name] for side in SIDES} for name in first["trl"]},
    }


def write_word_sums(file: Path) -> None:
    """Write the training prompts of `examples/smollm2`, with its system message."""
    sys.path.insert(0, str(ROOT / "examples" / "smollm2"))
    from word_sums import make_split

    rows = make_split(1)[0]
    for row in rows:
        row["prompt"].insert(0, {"role": "system", "content": "Answer with one equation."})
    file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def fixed_update(lengths: list[int], arguments: argparse.Namespace) -> Any:
    """Return rollouts of random tokens (as `update.py`), advantages and shifts of log-probs.

    Advantages are [rows]; shifts [rows, response] are added to log-probs to make the old ones.
    """
    import torch
    from update import make_rollouts

    generator = torch.Generator().manual_seed(4)
    rollouts = make_rollouts(lengths, arguments)
    advantages = torch.randn(len(lengths), generator=generator)
    return rollouts, advantages, 0.3 * torch.randn(rollouts.response_ids.shape, generator=generator)


def our_seconds(
    side: str, lengths: list[int], folder: Path, arguments: argparse.Namespace
) -> list[float]:
    """Train with this package in this process; return the seconds of each iteration."""
    tree = our_tree(folder, arguments)
    del tree["model"]  # so that it comes from config.json
    for role in ("ref", "critic"):
        del tree[role], tree["placement"][role]
    tree["training"] |= {
        "stage": "ray_grpo",
        "model": "auto",
        "bf16": arguments.dtype == "bf16",
        "global_batch_size": arguments.prompts,
        "seq_length": arguments.prompt + arguments.limit,
    }
    tree["actor_rollout"] |= {
        "max_prompt_length": arguments.prompt,
        "n_samples_per_prompt": arguments.samples,
        "share_prompts": side == "shared",
    }
    (folder / "reward.py").write_text(REWARD, encoding="utf-8")
    tree["reward"] = {"kind": "rule", "functions": [f"{folder}/reward.py:score"]}
    tree["algorithm"] = {
        "adv_estimator": "grpo", "kl_ctrl": {"kl_coef": 0.0}, "old_log_probs": "rollout",
    }  # fmt: skip
    seconds = seconds_of(tree, lengths, folder)
    first = our_first(tree, lengths, arguments) if arguments.dtype == "fp32" else {}
    (folder / f"{side}.json").write_text(json.dumps(first))
    return seconds


def our_first(
    tree: dict[str, Any], lengths: list[int], arguments: argparse.Namespace
) -> dict[str, float]:
    """Return loss and gradient norm of one update on fixed responses."""
    import torch

    from mindspeed_rlxf.cluster.local import LocalRuntime
    from mindspeed_rlxf.config.load import resolve
    from mindspeed_rlxf.data.batch import Experience
    from mindspeed_rlxf.roles.actor import ActorRole

    LocalRuntime.from_config(config := resolve(tree, "grpo_step"))
    role = ActorRole(config)
    rollouts, advantages, shifts = fixed_update(lengths, arguments)
    old, none = role.engine.log_probs(rollouts, 1.0), torch.zeros(len(lengths), 0)
    assert old is not None
    experience = Experience(
        advantages=advantages[:, None] * rollouts.trained_mask,
        trained_mask=rollouts.trained_mask,
        old_log_probs=old.log_probs + shifts * rollouts.trained_mask,
        ref_log_probs=none,
        returns=none,
        values=none,
        value_mask=none.bool(),
    )
    report = role.update_policy(rollouts, experience, [list(range(len(lengths)))]).report
    return {"loss": report.steps[0]["pg_loss"], "grad_norm": report.steps[0]["grad_norm"]}


def trl_seconds(
    _side: str, lengths: list[int], folder: Path, arguments: argparse.Namespace
) -> list[float]:
    """Train with TRL in this process; return the seconds of each iteration."""
    import torch
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast
    from trl import GRPOConfig, GRPOTrainer

    torch.set_num_threads(arguments.threads)
    tokenizer = PreTrainedTokenizerFast.from_pretrained(folder / "tokenizer", padding_side="left")
    policy = AutoModelForCausalLM.from_pretrained(
        folder / "policy", attn_implementation="sdpa", dtype=torch.float32
    )
    lines = (folder / "train.jsonl").read_text(encoding="utf-8").splitlines()
    force_lengths(policy, lengths, tokenizer.eos_token_id)
    config = GRPOConfig(
        output_dir=tempfile.mkdtemp(dir=folder),
        max_steps=1 + arguments.iterations,
        per_device_train_batch_size=arguments.samples,
        gradient_accumulation_steps=arguments.prompts,
        num_generations=arguments.samples,
        max_completion_length=arguments.limit,
        beta=0.0,
        shuffle_dataset=False,
        use_cpu=arguments.device == "cpu",
        **(TRL_SETTINGS | {"bf16": arguments.dtype == "bf16"}),
    )

    def reward(completions: list[Any], **_: Any) -> list[float]:
        texts = [c if isinstance(c, str) else c[0]["content"] for c in completions]
        return [len(text) % 7 / 7 for text in texts]

    trainer = GRPOTrainer(
        model=policy,
        reward_funcs=reward,
        args=config,
        train_dataset=Dataset.from_list([{"prompt": json.loads(x)["prompt"]} for x in lines]),
        processing_class=tokenizer,
    )
    first = {}
    if arguments.dtype == "fp32":
        first = trl_first(trainer, *fixed_update(lengths, arguments), arguments.samples)
    (folder / "trl.json").write_text(json.dumps(first), encoding="utf-8")
    return step_seconds(trainer)


def trl_first(
    trainer: Any, rollouts: Any, advantages: Any, shifts: Any, size: int
) -> dict[str, float]:
    """Return loss and gradient norm of TRL on fixed responses, in micro-batches of `size`."""
    from update import trl_inputs, trl_log_probs

    trainer.current_gradient_accumulation_steps = rollouts.num_rows // size
    trainer.model.train()
    loss = 0.0
    for start in range(0, rollouts.num_rows, size):
        rows = slice(start, start + size)
        weighted = advantages[:, None] * rollouts.trained_mask
        inputs = trl_inputs(rollouts, weighted, rows, trainer.model.device)
        old = trl_log_probs(trainer, inputs)
        inputs["old_per_token_logps"] = old + shifts[rows, : old.size(1)].to(old.device)
        part = trainer.compute_loss(trainer.model, inputs)
        part.backward()
        loss += float(part)
    grads = [p.grad for p in trainer.model.parameters() if p.grad is not None]
    norm = sum(float(grad.double().norm()) ** 2 for grad in grads) ** 0.5
    trainer.model.zero_grad()
    return {"loss": loss, "grad_norm": norm}


if __name__ == "__main__":
    main()
