"""Run one stage of `bring_up.py` in this process.

    python examples/tiny/bring_up_stages.py STAGE --device cpu --work DIR

The last line of the output is a JSON object, name -> number or list of numbers.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mindspeed_rlxf.config.schema import RunConfig
    from mindspeed_rlxf.roles.all_roles import RoleGroups
    from mindspeed_rlxf.trainer.prompt_source import PromptSource

ROOT = Path(__file__).resolve().parents[2]
START, SMOLLM2 = ROOT / "tests" / "golden" / "start", ROOT / "examples" / "smollm2"
MODEL = Path("outputs/smollm2/model").resolve()  # where `make demo-real` puts it
PROMPTS, ITERATIONS, TIMEOUT_S = 16, 3, 120.0
SMALL: dict[str, Any] = {
    "model.tiny.num_layers": 2,
    "model.tiny.hidden_size": 48,
    "model.tiny.ffn_hidden_size": 96,
    "training.global_batch_size": PROMPTS,
    "training.tokenizer_name_or_path": START,
    "actor_rollout.load": START,
    "actor_rollout.ppo_mini_batch_size": PROMPTS,
    "actor_rollout.micro_batch_size": 8,
    "ref.load": START,
    "critic.load": START,
    "critic.critic_mini_batch_size": PROMPTS,
    "critic.micro_batch_size": 8,
    "data.train_files": START / "prompts.jsonl",
    "data.val_files": "[]",
    "validation.interval": 0,
    "resource_pool.main": 1,
    "runtime.kind": "local",
}
REAL: dict[str, Any] = {
    "training.global_batch_size": 2,
    "training.tokenizer_name_or_path": MODEL,
    "actor_rollout.load": MODEL,
    "actor_rollout.lr_decay_style": "constant",
    "actor_rollout.n_samples_per_prompt": 4,
    "actor_rollout.ppo_mini_batch_size": 4,
    "actor_rollout.max_new_tokens": 16,
    "algorithm.filter_groups": False,
    "algorithm.max_num_gen_batches": 10,  # the default, as nothing is filtered
    "reward.function": f"{SMOLLM2}/word_sums.py:score",
    "data.shuffle": False,
    "data.val_files": "[]",
    "validation.interval": 0,
    "resource_pool.main": 1,
    "runtime.kind": "local",
}
KEPT = (
    "actor/pg_loss_abs", "actor/entropy", "actor/grad_norm", "critic/vf_loss", "critic/grad_norm",
    "critic/kl", "critic/score/mean", "critic/advantages/max", "response_length/mean",
)  # fmt: skip

Numbers = dict[str, Any]


@dataclass(frozen=True)
class Task:
    """What a stage trains: a configuration, changes to it, and fixed responses."""

    config: str
    folder: Path | None  # with the configuration; None = those of the package
    changes: dict[str, Any]
    write: Callable[[Path, int], Iterator[str]]  # prompts; yields responses for n iterations


def write_tiny(_work: Path, iterations: int) -> Iterator[str]:
    """Yield numbers; the prompts exist."""
    yield from (str(7 * i % 200) for i in range(PROMPTS * iterations))


def write_sums(work: Path, iterations: int) -> Iterator[str]:
    """Write word sums to `train.jsonl`; yield four answers to each, two of them right."""
    sys.path.insert(0, str(SMOLLM2))
    from word_sums import make_split

    rows = make_split(1)[0][: 2 * iterations]
    text = "".join(json.dumps(row) + "\n" for row in rows)
    (work / "train.jsonl").write_text(text, encoding="utf-8")
    for row in rows:
        right = int(row["ground_truth"])
        yield from (f"It is {right}.", f"{right + 1}", f"The answer is {right}.", f"= {right + 2}")


TINY = Task("ppo_trainer_tiny", None, SMALL, write_tiny)
WORD_SUMS = Task("grpo", SMOLLM2, REAL, write_sums)


def import_(kind: str, _work: Path) -> Numbers:
    """Import torch and the device's library, without using a device. Returns no numbers."""
    import torch

    from mindspeed_rlxf import device
    from mindspeed_rlxf.config.enums import DeviceKind

    device.select_first_device(DeviceKind(kind))
    print(f"torch {torch.__version__}, devices: {device.device_count(DeviceKind(kind))}")
    return {}


def patch(kind: str, _work: Path) -> Numbers:
    """Import the adaptor and Megatron; compute a layer's operations.

    Returns for each result the sum of absolute values and one number.
    """
    import torch
    import torch.nn.functional as F

    where = claim(kind)
    import megatron.core

    print(f"on {where}, megatron-core {megatron.core.__version__}")

    def wave(*shape: int) -> Any:
        count = torch.Size(shape).numel()
        return torch.arange(count, dtype=torch.float32).sin().reshape(shape).to(where)

    a, b, heads = wave(32, 48), wave(48, 64), wave(1, 4, 16, 8)
    results = {
        "matmul": a @ b,
        "matmul_bf16": (a.bfloat16() @ b.bfloat16()).float(),
        "rms_norm": F.rms_norm(a, (48,)),
        "silu": F.silu(a),
        "softmax": a.softmax(-1),
        "logsumexp": a.logsumexp(-1),
        "attention": F.scaled_dot_product_attention(heads, heads, heads, is_causal=True),
    }
    return {name: [float(x.abs().sum()), float(x.flatten()[7])] for name, x in results.items()}


def collective(kind: str, _work: Path) -> Numbers:
    """Call every collective used in training, among the processes named by torchrun's variables.

    The returned numbers do not depend on rank and process count.
    """
    import torch
    import torch.distributed as dist

    where = claim(kind)
    from mindspeed_rlxf.cluster.local import LocalRuntime
    from mindspeed_rlxf.config.enums import DeviceKind

    runtime = LocalRuntime(DeviceKind(kind), 1, TIMEOUT_S)
    rank, size = runtime.rank, runtime.size
    mine, parts = torch.arange(4.0, device=where) + rank, torch.zeros(4 * size, device=where)
    results = {}
    dist.all_reduce(total := mine.clone())
    results["all_reduce"] = float(total.sum()) / size - 2 * (size - 1)
    dist.all_reduce(largest := mine.clone(), op=dist.ReduceOp.MAX)
    results["all_reduce_max"] = float(largest[0]) - (size - 1)
    dist.all_gather_into_tensor(parts, mine)
    results["all_gather"] = float(parts[:4].sum())
    dist.reduce_scatter_tensor(mine, parts)
    results["reduce_scatter"] = float(mine.sum()) / size - 4 * rank
    dist.all_to_all_single(torch.empty_like(parts), parts)
    dist.broadcast(told := torch.full((2,), 7.0 + rank, device=where), src=0)
    results["broadcast"] = float(told.sum())
    if size > 1:
        passed = torch.full((2,), float(rank), device=where)
        got = torch.empty_like(passed)
        ring = [
            dist.P2POp(dist.isend, passed, (rank + 1) % size),
            dist.P2POp(dist.irecv, got, (rank - 1) % size),
        ]
        for work in dist.batch_isend_irecv(ring):
            work.wait()
        assert got.tolist() == [float((rank - 1) % size)] * 2, "send and receive"
    host = dist.new_group(backend="gloo")
    exact = torch.tensor([1 + 2.0**-40], dtype=torch.double)
    dist.all_reduce(exact, group=host)
    results["fp64_on_host"] = (float(exact) / size - 1) * 2.0**40
    runtime.shutdown()
    return results


def forward(kind: str, work: Path, task: Task = TINY) -> Numbers:
    """Load weights from a Hugging Face folder; return log-probs for fixed responses."""
    _runtime, roles, source, config = start(kind, work, task)
    from mindspeed_rlxf.cluster.refs import resolve
    from mindspeed_rlxf.roles.reports import ResponseLengths

    roles.rollout.update_weights(roles.actor, 0)
    prompts = source.next_groups(config.training.global_batch_size)
    generated = roles.rollout.generate(prompts, seed=1)

    def lengths() -> ResponseLengths:
        (report,) = generated.result()
        return ResponseLengths(report.prompt_lengths, report.response_lengths, report.has_eos)

    log_probs = roles.actor.log_probs(generated.rows(), lengths)
    rows = resolve(log_probs.rows(), lambda hs: [h.rows for h in hs])
    return {"log_probs": [round(x, 6) for x in rows.log_probs.sum(-1).tolist()]}  # type: ignore[attr-defined]


def update(kind: str, work: Path, task: Task = TINY) -> Numbers:
    """Do iterations on fixed responses, each of two steps on word sums: loss, gradients, Adam."""
    return train(kind, work, 2 if task is TINY else 3, task, fixed=True)


def resume(kind: str, work: Path) -> Numbers:
    """Do the iterations of `update` on word sums in two runs: the second does the third one."""
    saves = replace(WORD_SUMS, changes={**REAL, "training.save_interval": 1})
    train(kind, work, 2, saves, fixed=True)
    before = (work / "run" / "metrics.jsonl").read_text(encoding="utf-8")
    numbers = train(kind, work, 3, saves, fixed=True)
    after = (work / "run" / "metrics.jsonl").read_text(encoding="utf-8")
    assert after.startswith(before), "the second run did the first iterations again"
    return numbers


def generate(kind: str, work: Path, task: Task = TINY) -> Numbers:
    """Return greedy responses, generated with the KV cache."""
    _runtime, roles, source, config = start(kind, work, task, fixed=False)
    from mindspeed_rlxf.cluster.refs import resolve
    from mindspeed_rlxf.roles.rollout import Sampling

    roles.rollout.update_weights(roles.actor, 0)
    prompts = source.next_groups(config.training.global_batch_size)
    pending = roles.rollout.generate(prompts, seed=1, sampling=Sampling.GREEDY)
    rows: Any = resolve(pending.rows(), lambda hs: [h.rows for h in hs])
    lengths = rows.response_lengths.tolist()
    responses = zip(rows.response_ids.tolist(), lengths, strict=True)
    return {"tokens": [token for ids, n in responses for token in ids[:n]], "lengths": lengths}


def ppo(kind: str, work: Path) -> Numbers:
    """Run the whole PPO loop with sampled responses."""
    return train(kind, work, ITERATIONS, TINY, fixed=False)


STAGES: dict[str, Callable[[str, Path], Numbers]] = {
    "import": import_,
    "patch": patch,
    "collective": collective,
    "forward": forward,
    "update": update,
    "generate": generate,
    "ppo": ppo,
    "real-forward": partial(forward, task=WORD_SUMS),
    "real-generate": partial(generate, task=WORD_SUMS),
    "real-update": partial(update, task=WORD_SUMS),
    "real-resume": resume,
}


def claim(kind: str) -> Any:
    """Set up this process's device and return it. Call this before importing Megatron."""
    from mindspeed_rlxf import device
    from mindspeed_rlxf.cluster.local import claim_device
    from mindspeed_rlxf.config.enums import DeviceKind

    claim_device(DeviceKind(kind), 1, TIMEOUT_S)
    return device.current_device()


def configure(kind: str, work: Path, iterations: int, task: Task, fixed: bool) -> Any:
    """Return the configuration for a run on one device; `fixed` uses fixed responses."""
    from mindspeed_rlxf.config.compose import compose
    from mindspeed_rlxf.config.load import resolve

    changes = {**task.changes, "device.kind": kind, "training.train_iters": iterations}
    changes["training.output_dir"] = work / "run"
    answers = [{"response": text} for text in task.write(work, max(iterations, 3))]
    if task.folder:
        changes["data.train_files"] = work / "train.jsonl"
    if fixed:
        file = work / "responses.jsonl"
        file.write_text("".join(json.dumps(a) + "\n" for a in answers), encoding="utf-8")
        changes["actor_rollout.fixed_responses"] = file
    settings = [f"{key}={value}" for key, value in changes.items()]
    folder = None if task.folder is None else str(task.folder)
    return resolve(compose(task.config, settings, folder), "bring_up")


def start(
    kind: str, work: Path, task: Task, fixed: bool = True
) -> tuple[Any, RoleGroups, PromptSource, RunConfig]:
    """Build all roles in this process; return runtime, roles, prompts and configuration."""
    config = configure(kind, work, 1, task, fixed)
    claim(kind)
    from mindspeed_rlxf.cluster.local import LocalRuntime
    from mindspeed_rlxf.data.sampler import PromptSampler
    from mindspeed_rlxf.roles.all_roles import RoleGroups
    from mindspeed_rlxf.trainer.preflight import prepare
    from mindspeed_rlxf.trainer.prompt_source import PromptSource

    prepared = prepare(config)
    runtime = LocalRuntime.from_config(config)
    pools = runtime.create_pools(config.resource_pool)
    roles = RoleGroups.build(config, pools, prepared.eos_token_ids)
    prompts, batch = prepared.train_prompts, config.training.global_batch_size
    sampler = PromptSampler(len(prompts), batch, 1, False)
    count = config.actor_rollout.n_samples_per_prompt
    source = PromptSource(prompts, sampler, count, prepared.fixed_responses)
    return runtime, roles, source, config


def train(kind: str, work: Path, iterations: int, task: Task, fixed: bool) -> Numbers:
    """Train and return the metrics in KEPT, each as a list over the iterations."""
    config = configure(kind, work, iterations, task, fixed)
    claim(kind)
    from mindspeed_rlxf.trainer.preflight import prepare
    from mindspeed_rlxf.trainer.run import run

    code = run(config, prepare(config))
    assert code == 0, f"the run ended with exit code {code}"
    lines = (work / "run" / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    metrics = [json.loads(line)["metrics"] for line in lines]
    return {name: [m[name] for m in metrics] for name in KEPT if name in metrics[0]}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("stage", choices=STAGES)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--work", type=Path, required=True)
    arguments = parser.parse_args()
    numbers = STAGES[arguments.stage](arguments.device, arguments.work)
    print(json.dumps(numbers), flush=True)
