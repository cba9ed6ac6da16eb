"""Measure the seconds of a policy's forward pass and update, without Ray, beside plain torch.

`ours` is the actor with its Megatron engine: packed sequences, log-probs of response tokens, the
clipped loss, one step of Adam. `plain` is transformers' model with the same weights in the same
process: padded rows, the same loss, torch's AdamW. They have micro-batches of the same rows and
take turns; medians of 5. `fsdp` is the actor with `backend: fsdp`, in a process of its own that
works when asked, as its process must not load Megatron. `trl` (with `--trl`) is the training step
of TRL's GRPOTrainer in a third process: its log-probs, clipped loss and AdamW on the rows of
`plain`, with the same advantages and old log-probs. Rows are padded to the longest of their
micro-batch (TRL itself pads to the longest of the batch), and it has no critic, as `ours` (TRL's
PPOTrainer updates policy and critic together). Prompts have 64 tokens, responses the lengths of
`rollout_lengths.json`.
Ends with an error if their log-probs differ before the measurement. Prints one JSON line.

    python benchmarks/update.py [--device cpu|cuda|npu] [--bf16] [--size 19m|100m] [--batch 16]
    python benchmarks/update.py --size 100m --batch 8 --trl FOLDER
    python benchmarks/update.py --prompts 4 --samples 8 --prompt 256 --response 64
    python benchmarks/update.py --cp 2 --batch 4 --prompt 1024 --limit 3072
    python benchmarks/update.py --model outputs/smollm2/model --prompts 16 --prompt 40 --response 16

With `--prompts` there are so many prompts of `--prompt` tokens, each with `--samples` responses of
half to one and a half of `--response` tokens, all samples of a prompt in one micro-batch; `apart`
is then our side with `share_prompts: false`. With `--cp` the sides `cp` and `fsdp_cp` are ours on
so many processes that share the tokens of each micro-batch (`context_parallel_size`); on a CPU they
share its threads. `alone` is ours in a process of its own, and `peak_mib` the most memory during an
update, of the device or on a CPU of the whole process, on the rank with most.
`--model` takes the weights of a Hugging Face folder.
`matrix_products_share` is the part of our update's time, on the CPU, in matrix products and
attention, by torch's profiler. `ppo_step.py` says how to install TRL into a folder.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack, redirect_stdout
from datetime import timedelta
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from iteration import make_models, write_inputs
from ppo_step import BASE, LENGTHS, MICRO, PROMPT, SHAPES, TRL_SETTINGS, our_tree
from torch import Tensor
from torch.profiler import ProfilerActivity, profile
from transformers import AutoModelForCausalLM

from mindspeed_rlxf import device
from mindspeed_rlxf.config.enums import DeviceKind
from mindspeed_rlxf.config.load import resolve
from mindspeed_rlxf.config.schema import RunConfig
from mindspeed_rlxf.data.batch import Experience, Rollouts
from mindspeed_rlxf.engine.collective_errors import gather_all

LIMIT, CLIP, LR = 512, 0.2, 1e-6
PRODUCTS = ("mm", "addmm", "bmm", "baddbmm", "_scaled_dot_product_flash_attention_for_cpu")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", type=DeviceKind, default=DeviceKind.CPU)
    parser.add_argument("--bf16", action="store_true")
    parser.add_argument("--size", choices=list(SHAPES), default="19m")
    parser.add_argument("--model", type=Path, help="a folder to use in place of random weights")
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument(
        "--limit", type=int, default=LIMIT, help="most response tokens; scales all lengths"
    )
    parser.add_argument("--prompts", type=int, default=0)
    parser.add_argument("--samples", type=int, default=8)
    parser.add_argument("--prompt", type=int, default=PROMPT)
    parser.add_argument("--response", type=int, default=64)
    parser.add_argument("--cp", type=int, default=1, help="measures so many ranks together too")
    parser.add_argument("--trl", type=Path, help="folder with trl; measures it too")
    parser.add_argument("--serves", nargs=2, metavar=("SIDE", "FOLDER"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    arguments.micro = MICRO
    if arguments.prompts:
        arguments.batch = arguments.prompts * arguments.samples
        arguments.micro, arguments.limit = arguments.samples, 3 * arguments.response // 2
    served, folder = arguments.serves or ("ours", "")
    side, _, rank_of_cp = served.partition(".")
    if rank_of_cp:
        arguments.threads = max(1, arguments.threads // arguments.cp)
    is_megatron = side not in ("fsdp", "fsdp_cp", "trl")
    device.setup(arguments.device, arguments.threads, megatron=is_megatron)
    if side == "trl":  # has no process group
        serve(Trl, arguments)
        return
    rank, size, store = 0, 1, dist.HashStore()
    if rank_of_cp:  # a rank of several
        rank, size = int(rank_of_cp), arguments.cp
        store = dist.FileStore(str(Path(folder) / f"{side} store"), size)
    dist.init_process_group(
        device.facts(arguments.device).backend, store=store, rank=rank, world_size=size,
        timeout=timedelta(minutes=5),
    )  # fmt: skip
    if arguments.serves:
        backend = "megatron" if is_megatron else "fsdp"
        serve(partial(make_actor, backend, size), arguments)
    else:
        with tempfile.TemporaryDirectory() as name:
            print(json.dumps(measure(Path(name), arguments)))
    dist.destroy_process_group()


def measure(folder: Path, arguments: argparse.Namespace) -> dict[str, Any]:
    write_inputs(folder, BASE["vocab_size"], arguments.prompt)
    if arguments.model:
        for name in ("policy", "scorer"):  # the latter for the plan of a critic, which is not built
            (folder / name).symlink_to(arguments.model.resolve())
    else:
        longest = arguments.prompt + arguments.limit
        shape = SHAPES[arguments.size]
        positions = max(shape["max_position_embeddings"], longest)
        make_models(folder, shape | {"max_position_embeddings": positions})
    rollouts, lengths = make_all_rollouts(arguments)
    with ExitStack() as stack:
        names = ["fsdp", *["trl"] * bool(arguments.trl)]
        others: dict[str, Any] = {}
        for name in names:
            others[name] = stack.enter_context(Served(name, folder, arguments))
        if arguments.cp > 1:
            others["alone"] = stack.enter_context(Served("alone", folder, arguments))
            for name in ("cp", "fsdp_cp"):
                served = [
                    Served(f"{name}.{rank}", folder, arguments) for rank in range(arguments.cp)
                ]
                others[name] = Together([stack.enter_context(rank) for rank in served])
        return compare(folder, rollouts, lengths, others, arguments)


def make_all_rollouts(arguments: argparse.Namespace) -> tuple[Rollouts, list[int]]:
    stored = json.loads(LENGTHS.read_text(encoding="utf-8"))["responses"][: arguments.batch]
    lengths = [max(2, n * arguments.limit // LIMIT) for n in stored]
    if arguments.prompts:
        low, high = arguments.response // 2, 3 * arguments.response // 2
        drawn = torch.randint(
            low, high + 1, (arguments.batch,), generator=torch.Generator().manual_seed(3)
        )
        lengths = drawn.tolist()
    return make_rollouts(lengths, arguments), lengths


def compare(
    folder: Path, rollouts: Rollouts, lengths: list[int], others: dict[str, Any],
    arguments: argparse.Namespace,
) -> dict[str, Any]:  # fmt: skip
    ours = Ours(actor_config(folder, arguments), rollouts)
    theirs = Plain(folder, rollouts, arguments)
    all_sides: dict[str, Any] = {"ours": ours, "plain": theirs, **others}
    prompt_tokens = len(lengths) * arguments.prompt
    if arguments.prompts:
        config = actor_config(folder, arguments, share_prompts=False)
        all_sides["apart"] = Ours(config, rollouts)
        shared_tokens = arguments.prompts * arguments.prompt + sum(lengths)
    gap = float((ours.forward() - theirs.forward()).abs().max())
    assert gap < (0.5 if arguments.bf16 else 1e-3), f"the log-probs differ by {gap}"
    found: dict[str, Any] = {
        "benchmark": "update",
        "device": str(device.current_device()),
        "dtype": "bf16" if arguments.bf16 else "fp32",
        "parameters_m": round(sum(p.numel() for p in theirs.model.parameters()) / 1e6, 1),
        "tokens": prompt_tokens + sum(lengths),
        "padded_tokens": prompt_tokens + len(lengths) * max(lengths),
        "largest_log_prob_gap": gap,
        "threads": arguments.threads,
        "cores": os.cpu_count(),
        "torch": torch.__version__,
    }
    if arguments.prompts:
        found["tokens_ratio"] = round(found["tokens"] / shared_tokens, 2)
    for part in ("forward", "update"):
        sides = {name: getattr(side, part) for name, side in all_sides.items()}
        found |= race(part, sides, arguments.repeats)
    if arguments.cp > 1:
        for name in ("alone", "cp", "fsdp", "fsdp_cp"):
            found[f"update_{name}_peak_mib"] = others[name].peak_mib()
    if arguments.device is DeviceKind.CPU:
        found["matrix_products_share"] = products_share(ours.update)
    return found


def products_share(run: Callable[[], Any]) -> float:
    """Return the part of the calling thread's time in PRODUCTS and their backward passes."""
    with profile(activities=[ProfilerActivity.CPU]) as traced:
        run()
    times = {each.key: each.self_cpu_time_total for each in traced.key_averages()}
    names = {f"aten::{name}{end}" for name in PRODUCTS for end in ("", "_", "_backward")}
    return round(sum(times.get(name, 0.0) for name in names) / sum(times.values()), 3)


def race(part: str, sides: dict[str, Callable[[], Any]], repeats: int) -> dict[str, float]:
    """Run the sides in turn, the first time unmeasured; return their median seconds and ratios.

    part:  name of the figures
    sides: "ours" and others; a ratio is the other's seconds / ours
    """
    times: dict[str, list[float]] = {side: [] for side in sides}
    for turn in range(repeats + 1):
        for side, run in sides.items():
            started = time.perf_counter()
            run()
            device.synchronize()
            if turn:
                times[side].append(time.perf_counter() - started)
    medians = {side: statistics.median(all_s) for side, all_s in times.items()}
    found = {f"{part}_{side}_s": round(seconds, 4) for side, seconds in medians.items()}
    for side in sides.keys() - {"ours"}:
        name = f"{part}_ratio" if side == "plain" else f"{part}_{side}_ratio"
        found[name] = round(medians[side] / medians["ours"], 2)
    return found


def make_rollouts(lengths: list[int], arguments: argparse.Namespace) -> Rollouts:
    """Make random prompts, and random responses of these lengths."""
    rows, width, prompt = len(lengths), max(lengths), arguments.prompt
    generator = torch.Generator().manual_seed(1)
    mask = torch.arange(width) < torch.tensor(lengths)[:, None]
    ids = torch.randint(2, BASE["vocab_size"], (rows, prompt + width), generator=generator)
    if arguments.prompts:
        ids[:, :prompt] = ids[:: arguments.samples, :prompt].repeat_interleave(arguments.samples, 0)
    return Rollouts(
        sample_ids=list(range(rows)),
        prompt_ids=ids[:, :prompt],
        prompt_lengths=torch.full((rows,), prompt),
        response_ids=ids[:, prompt:] * mask,
        response_mask=mask,
        trained_mask=mask,
        has_eos=torch.zeros(rows, dtype=torch.bool),
        rollout_log_probs=torch.zeros(rows, width),
        ground_truths=[""] * rows,
        data_sources=[""] * rows,
        weights_version=torch.zeros(rows, width, dtype=torch.int32),
    )


def make_advantages(rollouts: Rollouts) -> Tensor:
    """Make random advantages [rows, response], the same in every call."""
    noise = torch.randn(rollouts.response_ids.shape, generator=torch.Generator().manual_seed(2))
    return noise * rollouts.trained_mask


class Served:
    """A side in a separate process (`serve`), as FSDP and Megatron cannot share one."""

    def __init__(self, side: str, folder: Path, arguments: argparse.Namespace) -> None:
        words = [sys.executable, "-W", "ignore", *sys.argv, "--serves", side, str(folder)]
        paths = [str(arguments.trl.resolve())] if side == "trl" else []
        environment = {"PYTHONPATH": os.pathsep.join([*paths, os.environ.get("PYTHONPATH", "")])}
        if "." in side:  # a rank of `--cp`
            environment["WORLD_SIZE"] = str(arguments.cp)
        self.process: Any = subprocess.Popen(
            words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
            env=os.environ | environment,
        )  # fmt: skip

    def __enter__(self) -> "Served":
        return self

    def __exit__(self, *_: object) -> None:
        self.process.stdin.close()
        try:
            self.process.wait(30)
        finally:
            self.process.kill()

    def ask(self, part: str) -> None:
        self.process.stdin.write(f"{part}\n")
        self.process.stdin.flush()

    def wait(self, part: str) -> str:
        """Return what the process says about its result, mostly nothing."""
        while True:
            said = self.process.stdout.readline()
            assert said, "a process that was asked has ended"
            if said.startswith(f"{part} done"):
                return str(said.removeprefix(f"{part} done").strip())

    def forward(self) -> None:
        Together([self]).forward()

    def update(self) -> None:
        Together([self]).update()

    def peak_mib(self) -> int:
        return Together([self]).peak_mib()


class Together:
    """Processes that do the same at the same time."""

    def __init__(self, processes: list[Served]) -> None:
        self.processes = processes

    def forward(self) -> None:
        self._run("forward")

    def update(self) -> None:
        self._run("update")

    def peak_mib(self) -> int:
        return max(int(said) for said in self._run("peak_mib"))

    def _run(self, part: str) -> list[str]:
        for process in self.processes:
            process.ask(part)
        return [process.wait(part) for process in self.processes]


def serve(make: Callable[..., Any], arguments: argparse.Namespace) -> None:
    rollouts, _ = make_all_rollouts(arguments)
    side = make(Path(arguments.serves[1]), rollouts, arguments)
    for line in sys.stdin:
        with redirect_stdout(sys.stderr):
            result = getattr(side, line.strip())()
        shown = result if isinstance(result, int) else ""
        print(f"{line.strip()} done {shown}", flush=True)


def actor_config(
    folder: Path,
    arguments: argparse.Namespace,
    backend: str = "megatron",
    cp: int = 1,
    **actor_keys: Any,
) -> RunConfig:
    """Return the configuration of `Ours`. actor_keys: further keys of `actor_rollout`"""
    given = SimpleNamespace(
        batch=arguments.batch, iterations=1, limit=arguments.limit, threads=arguments.threads,
        device=arguments.device.value, micro=arguments.micro,
    )  # fmt: skip
    tree = our_tree(folder, given)  # type: ignore[arg-type]
    del tree["model"]  # so that it comes from config.json
    tree["reward"] = {"kind": "rule"}
    tree["actor_rollout"] |= {"max_prompt_length": arguments.prompt, **actor_keys}
    tree["training"] |= {
        "bf16": arguments.bf16, "output_dir": str(folder / "run"),
        "seq_length": arguments.prompt + arguments.limit, "model": "auto", "backend": backend,
        "context_parallel_size": cp,
    }  # fmt: skip
    tree["algorithm"] = {"kl_ctrl": {"kl_coef": 0.0}, "old_log_probs": "recompute"}
    tree["resource_pool"] = {"main": cp}
    return resolve(tree, "update")


class Ours:
    """The policy in the actor of this package."""

    def __init__(self, config: RunConfig, rollouts: Rollouts) -> None:
        from mindspeed_rlxf.roles.actor import ActorRole

        self.role = ActorRole(config)
        self.rollouts, self.all_rows = rollouts, [list(range(rollouts.num_rows))]
        none = torch.zeros(rollouts.num_rows, 0)
        self.experience = Experience(
            advantages=make_advantages(rollouts),
            trained_mask=rollouts.trained_mask,
            old_log_probs=gather_all([self.forward()])[0],  # of the first rank
            ref_log_probs=none,
            returns=none,
            values=none,
            value_mask=none.bool(),
        )

    def forward(self) -> Tensor:
        found = self.role.engine.log_probs(self.rollouts, 1.0)
        if found is None:  # not the leader of a replica
            return torch.zeros(self.rollouts.trained_mask.shape)
        return found.log_probs

    def update(self) -> None:
        self.role.update_policy(self.rollouts, self.experience, self.all_rows)

    def peak_mib(self) -> int:
        """Return the most memory during an update: the device's, on a CPU the process's."""
        if device.current_device().type == "cpu":
            Path("/proc/self/clear_refs").write_text("5")  # forget the peak so far
            self.update()
            status = Path("/proc/self/status").read_text()
            return int(status.partition("VmHWM:")[2].split()[0]) // 1024
        device.reset_peak_memory()
        self.update()
        return device.peak_memory() // 1024**2


def make_actor(
    backend: str, cp: int, folder: Path, rollouts: Rollouts, arguments: argparse.Namespace
) -> Ours:
    return Ours(actor_config(folder, arguments, backend, cp), rollouts)


class Plain:
    """The policy in plain torch and transformers."""

    def __init__(self, folder: Path, rollouts: Rollouts, arguments: argparse.Namespace) -> None:
        dtype = torch.bfloat16 if arguments.bf16 else torch.float32
        self.where, self.prompt, self.micro = (
            device.current_device(), arguments.prompt, arguments.micro,
        )  # fmt: skip
        self.model: Any = AutoModelForCausalLM.from_pretrained(
            folder / "policy", attn_implementation="sdpa", dtype=dtype
        ).to(self.where)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=LR, weight_decay=0.0)
        self.rollouts, self.advantages = rollouts, make_advantages(rollouts).to(self.where)
        both = torch.cat((rollouts.prompt_ids, rollouts.response_ids), dim=1)
        self.ids, self.mask = both.to(self.where), rollouts.trained_mask.to(self.where)
        prompts = torch.ones_like(rollouts.prompt_ids).bool()
        self.attention_mask = torch.cat((prompts, rollouts.trained_mask), 1).to(self.where)
        self.old = self.forward().to(self.where)

    def _log_probs(self, rows: slice) -> Tensor:
        """Return the log-probs of a micro-batch [rows, response] fp32, up to its longest response.

        0 behind the end of a response.
        """
        width = int(self.mask[rows].sum(1).max())
        ids = self.ids[rows, : self.prompt + width]
        mask = self.attention_mask[rows, : self.prompt + width]
        logits = self.model(ids, attention_mask=mask).logits[:, self.prompt - 1 : -1].float()
        chosen = logits.gather(-1, ids[:, self.prompt :, None])[..., 0]
        return (chosen - logits.logsumexp(-1)) * self.mask[rows, :width]

    def _micro_batches(self) -> list[slice]:
        return [slice(i, i + self.micro) for i in range(0, self.rollouts.num_rows, self.micro)]

    @torch.no_grad()
    def forward(self) -> Tensor:
        out = torch.zeros(self.mask.shape)
        for rows in self._micro_batches():
            found = self._log_probs(rows).cpu()
            out[rows, : found.size(1)] = found
        return out

    def update(self) -> None:
        total = self.mask.sum()
        for rows in self._micro_batches():
            log_probs = self._log_probs(rows)
            width = log_probs.size(1)
            ratio = torch.exp(log_probs - self.old[rows, :width])
            unclipped = -self.advantages[rows, :width] * ratio
            clipped = -self.advantages[rows, :width] * ratio.clamp(1 - CLIP, 1 + CLIP)
            (torch.maximum(unclipped, clipped).sum() / total).backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()


def trl_inputs(
    rollouts: Rollouts, advantages: Tensor, rows: slice, where: Any = "cpu"
) -> dict[str, Tensor]:
    """Return a micro-batch of TRL's GRPOTrainer; advantages are [rows, response]."""
    prompts, mask = rollouts.prompt_ids[rows], rollouts.trained_mask[rows]
    width = int(mask.sum(1).max())
    found = {
        "prompt_ids": prompts,
        "prompt_mask": torch.ones_like(prompts),
        "completion_ids": rollouts.response_ids[rows, :width],
        "completion_mask": mask[:, :width].long(),
        "advantages": advantages[rows, :width],
        "num_items_in_batch": rollouts.trained_mask.sum(),
    }
    return {name: tensor.to(where) for name, tensor in found.items()}


@torch.no_grad()
def trl_log_probs(trainer: Any, inputs: dict[str, Tensor]) -> Tensor:
    """Return TRL's log-probs of a micro-batch's responses, [rows, response]."""
    both = [
        torch.cat([inputs[f"{part}_{kind}"] for part in ("prompt", "completion")], 1)
        for kind in ("ids", "mask")
    ]
    width = inputs["completion_ids"].size(1)
    with trainer.compute_loss_context_manager():
        found: Tensor = trainer._get_per_token_logps_and_entropies(trainer.model, *both, width)[0]
    return found


class Trl:
    """The policy in TRL's GRPOTrainer, from padded rows to the optimizer's step."""

    def __init__(self, folder: Path, rollouts: Rollouts, arguments: argparse.Namespace) -> None:
        from datasets import Dataset
        from transformers import PreTrainedTokenizerFast
        from trl import GRPOConfig, GRPOTrainer

        count = rollouts.num_rows // arguments.micro
        settings = {"bf16": arguments.bf16, "use_cpu": arguments.device is DeviceKind.CPU}
        config = GRPOConfig(
            output_dir=str(folder / "trl"),
            per_device_train_batch_size=arguments.micro,
            gradient_accumulation_steps=count,
            num_generations=arguments.micro,
            max_completion_length=arguments.limit,
            beta=0.0,
            **(TRL_SETTINGS | settings),
        )
        policy = AutoModelForCausalLM.from_pretrained(
            folder / "policy", attn_implementation="sdpa", dtype=torch.float32
        )
        tokenizer = PreTrainedTokenizerFast.from_pretrained(folder / "tokenizer")
        self.trainer: Any = GRPOTrainer(
            model=policy,
            reward_funcs=lambda completions, **_: [0.0] * len(completions),
            args=config,
            train_dataset=Dataset.from_dict({"prompt": [""] * rollouts.num_rows}),
            processing_class=tokenizer,
        )
        self.trainer.create_optimizer()
        self.trainer.current_gradient_accumulation_steps = count
        self.trainer._prepare_inputs = dict  # the rows below, in place of generated ones
        starts = range(0, rollouts.num_rows, arguments.micro)
        advantages, where = make_advantages(rollouts), device.current_device()
        self.inputs = [
            trl_inputs(rollouts, advantages, slice(i, i + arguments.micro), where) for i in starts
        ]
        for inputs, old in zip(self.inputs, self.forward(), strict=True):
            inputs["old_per_token_logps"] = old

    def forward(self) -> list[Tensor]:
        return [trl_log_probs(self.trainer, inputs) for inputs in self.inputs]

    def update(self) -> None:
        trainer = self.trainer
        for inputs in self.inputs:
            trainer.training_step(trainer.model, inputs, None)
        trainer.accelerator.clip_grad_norm_(trainer.model.parameters(), trainer.args.max_grad_norm)
        trainer.optimizer.step()
        trainer.model.zero_grad()


if __name__ == "__main__":
    main()
