"""The peak memory of a role is the planned one, within 10% (FSDP 15%), in its own CPU processes."""

import gc
import json
import os
import sys
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from mindspeed_rlxf.cluster.local import LocalRuntime
from mindspeed_rlxf.config.enums import DeviceKind, Role
from mindspeed_rlxf.config.schema import (
    ArchitectureConfig,
    OffloadConfig,
    OptimizerConfig,
    RunConfig,
)
from mindspeed_rlxf.data.batch import Experience, RoleOutput, Rollouts
from mindspeed_rlxf.engine import offload
from mindspeed_rlxf.ops.planning.memory import role_memory
from mindspeed_rlxf.roles.actor import ActorRole
from mindspeed_rlxf.roles.critic import CriticRole
from tests.distributed.cluster.test_local_runtime import torchrun
from tests.distributed.groups import build_group
from tests.distributed.llamas import make_llama, run_config
from tests.distributed.samples import make_experience
from tests.processes import run_python
from tests.rows import made_rollouts
from tests.traced import traced_peak

WIDE = ArchitectureConfig(
    num_layers=4, hidden_size=256, ffn_hidden_size=704, num_attention_heads=4, num_query_groups=2,
    vocab_size=4096, max_position_embeddings=4096, untie_embeddings_and_output_weights=True,
)  # fmt: skip
# The width and the vocabulary of Qwen2.5-7B, with the embedding as output layer.
REAL = ArchitectureConfig(
    num_layers=1, hidden_size=3584, ffn_hidden_size=18944, num_attention_heads=28,
    num_query_groups=4, vocab_size=152064, max_position_embeddings=4096,
    untie_embeddings_and_output_weights=False, add_qkv_bias=True,
)  # fmt: skip


@dataclass(frozen=True)
class Shape:
    """What to measure: four samples in one micro-batch, each with these tokens."""

    architecture: ArchitectureConfig = WIDE
    role: Role = Role.ACTOR_ROLLOUT
    prompt: int = 64
    response: int = 448
    keys: dict[str, Any] = field(default_factory=dict)  # further keys of the role
    micro_batch: int = 4
    backend: str = "megatron"
    layout: dict[str, Any] = field(default_factory=dict)  # keys of every role
    ranks: int = 1
    family: dict[str, Any] = field(default_factory=dict)  # changes of config.json


PRINTED = "allocated: "  # before the line that a measuring process prints
GROUP = {"n_samples_per_prompt": 4, "do_sample": True}
ADAPTERS = {"lora": {"rank": 16}}
CP2 = {"context_parallel_size": 2}
MISTRAL = {  # windows make its layers keep scores of all pairs of tokens
    "model_type": "mistral", "architectures": ["MistralForCausalLM"], "sliding_window": 128,
}  # fmt: skip
SHAPES = {
    "actor": Shape(),
    "actor, shared prompt": Shape(prompt=448, response=64, keys=GROUP),
    "actor, shared short prompt": Shape(prompt=256, response=256, keys=GROUP),
    "actor, long prompts": Shape(prompt=448, response=64),
    "actor, recompute full": Shape(keys={"recompute": "full"}),
    "actor, recompute selective": Shape(keys={"recompute": "selective"}),
    "actor, recompute elementwise": Shape(keys={"recompute": "elementwise"}),
    "actor, recompute elementwise, bf16": Shape(keys={"recompute": "elementwise", "bf16": True}),
    "actor, adapters, recompute elementwise": Shape(keys={**ADAPTERS, "recompute": "elementwise"}),
    "actor, bf16": Shape(keys={"bf16": True}),
    "actor, offload": Shape(keys={"offload": OffloadConfig(weights=True, optimizer=True)}),
    "actor, offload of the optimizer": Shape(keys={"offload": OffloadConfig(optimizer=True)}),
    "actor, adapters": Shape(keys=ADAPTERS),
    "actor, adapters, bf16": Shape(keys={**ADAPTERS, "bf16": True}),
    "actor, adapters, recompute full": Shape(keys={**ADAPTERS, "recompute": "full"}),
    "critic": Shape(role=Role.CRITIC),
    "critic, adapters": Shape(role=Role.CRITIC, keys=ADAPTERS),
    "fsdp actor": Shape(backend="fsdp"),
    "fsdp actor, 2 micro-batches": Shape(micro_batch=2, backend="fsdp"),
    "fsdp actor, recompute full": Shape(keys={"recompute": "full"}, backend="fsdp"),
    "fsdp actor, bf16": Shape(keys={"bf16": True}, backend="fsdp"),
    "fsdp critic": Shape(role=Role.CRITIC, backend="fsdp"),
    "fsdp actor, adapters": Shape(keys=ADAPTERS, backend="fsdp"),
    # Of one chunk: with several, bf16 logits are gone before the products that the plan counts.
    "fsdp actor, adapters, recompute full, bf16": Shape(
        keys={**ADAPTERS, "recompute": "full", "bf16": True}, micro_batch=2, backend="fsdp"
    ),
    "fsdp critic, adapters": Shape(role=Role.CRITIC, keys=ADAPTERS, backend="fsdp"),
    "fsdp actor, 2 ranks": Shape(backend="fsdp", ranks=2),
    "fsdp actor, 2 ranks, 2 micro-batches": Shape(micro_batch=2, backend="fsdp", ranks=2),
    "fsdp actor, 2 ranks, 2 reduced micro-batches": Shape(
        micro_batch=2, backend="fsdp", ranks=2, keys={"reduce_each_micro_batch": True}
    ),
    "fsdp critic, adapters, 2 ranks": Shape(
        role=Role.CRITIC, keys=ADAPTERS, backend="fsdp", ranks=2
    ),
    "fsdp actor, window": Shape(backend="fsdp", family=MISTRAL),
    "fsdp actor, window, padded": Shape(
        keys={"packed_sequences": False}, backend="fsdp", family=MISTRAL
    ),
    "fsdp actor, window, recompute full, bf16": Shape(
        keys={"recompute": "full", "bf16": True}, backend="fsdp", family=MISTRAL
    ),
    "fsdp critic, window, ulysses": Shape(
        role=Role.CRITIC, backend="fsdp", layout=CP2, ranks=2, family=MISTRAL
    ),
    "actor, 8k tokens": Shape(prompt=256, response=1792),
    "actor, 8k tokens, cp 2": Shape(prompt=256, response=1792, layout=CP2, ranks=2),
    "actor, 8k tokens, cp 2, recompute selective": Shape(
        prompt=256, response=1792, keys={"recompute": "selective"}, layout=CP2, ranks=2
    ),
    "fsdp actor, 8k tokens, cp 2": Shape(
        prompt=256, response=1792, backend="fsdp", layout=CP2, ranks=2
    ),
    "real width, 1 layer": Shape(REAL),
    # A critic, because an actor of two layers would need more than 23 GB.
    "real width, 2 layers": Shape(
        REAL.model_copy(update={"num_layers": 2}), Role.CRITIC, keys={"recompute": "full"}
    ),
}


def lasting(engine: Any) -> tuple[int, ...]:
    """Bytes of weights, gradients and optimizer between updates."""
    if hasattr(engine, "shards"):  # of FSDP
        tensors = [shard.local for shard in engine.shards], engine.optimizer.tensors()
        return tuple(sum(each.nbytes for each in of) for of in tensors)
    from tests.distributed.test_memory_plan import measured  # brings in Megatron

    return measured(engine)[0]


class _Traced:
    """Measures the peaks of a role. Subclasses name its forward pass and its update."""

    engine: Any
    update: Any

    def measure(self, rollouts: Rollouts, experience: Experience) -> RoleOutput:
        """Report bytes before a forward pass and an update, and the peak of what it allocates.

        The peak is that of the rank with most.
        A first update, which creates the optimizer's state, is not measured.
        """
        whole = [list(range(rollouts.num_rows))]
        phases = {
            "forward": partial(self.forward, rollouts),
            "update": partial(self.update, rollouts, experience, whole),
        }
        phases["update"]()
        peaks = {}
        for name, phase in phases.items():
            with offload.holding():  # offloads every part that may be offloaded
                before = sum(lasting(self.engine))
            peak = torch.tensor(traced_peak(phase))
            dist.all_reduce(peak, dist.ReduceOp.MAX)
            peaks[name] = before, int(peak)
        return RoleOutput(report=peaks)


class TracedActor(_Traced, ActorRole):
    update = ActorRole.update_policy

    def forward(self, rollouts: Rollouts) -> None:
        self.engine.log_probs(rollouts, 1.0)


class TracedCritic(_Traced, CriticRole):
    update = CriticRole.update_critic

    def forward(self, rollouts: Rollouts) -> None:
        self.engine.values(rollouts)


def make_rows(shape: Shape) -> tuple[Rollouts, Experience]:
    """Return four samples, each as long as the configuration allows, and random experience."""
    generator, rows = torch.Generator().manual_seed(0), 4
    vocab = shape.architecture.vocab_size

    def tokens(width: int) -> torch.Tensor:
        return torch.randint(0, vocab, (rows, width), generator=generator)

    prompts = tokens(shape.prompt)
    if shape.keys.get("n_samples_per_prompt"):
        prompts = prompts[:1].expand(rows, -1)
    mask = torch.ones(rows, shape.response, dtype=torch.bool)
    rollouts = made_rollouts(
        prompt_ids=prompts, prompt_lengths=torch.full((rows,), shape.prompt),
        response_ids=tokens(shape.response), response_mask=mask,
        has_eos=torch.zeros(rows, dtype=torch.bool), data_sources=["test"] * rows,
    )  # fmt: skip
    return rollouts, make_experience(rollouts)


def make_config(shape: Shape, folder: Path) -> RunConfig:
    """Write a random model of the shape to `folder`; return a configuration that loads it."""
    scored = shape.role is Role.CRITIC
    make_llama(folder, shape.architecture, scored=scored)
    gc.collect()  # free the model that was written
    described = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(described | shape.family))
    batch = 4 * shape.ranks // shape.layout.get("context_parallel_size", 1)
    keys = {"micro_batch_size": shape.micro_batch, "backend": shape.backend, **shape.layout}
    return run_config(
        folder, folder, shape.architecture, keys, shape.ranks, OptimizerConfig(lr=1e-6),
        actor_rollout={
            "max_prompt_length": shape.prompt,
            "max_new_tokens": shape.response,
            "ppo_mini_batch_size": batch,
            **(shape.keys if not scored else {}),
        },
        critic={"critic_mini_batch_size": batch, **(shape.keys if scored else {})},
        training={"seq_length": shape.prompt + shape.response, "global_batch_size": batch},
    )  # fmt: skip


def marks_of(name: str) -> list[pytest.MarkDecorator]:
    return [pytest.mark.long, *[pytest.mark.large] * name.startswith("real width")]


_allocated: dict[str, dict[str, int]] = {}  # of each shape


def allocated_bytes(name: str, folder: Path) -> dict[str, int]:
    """Measure a shape, in processes of its own, and compare it with the plan.

    Returns the peak of what its forward pass and its update allocate.
    """
    if name not in _allocated:
        launcher = torchrun(SHAPES[name].ranks)
        printed = run_python(
            *launcher, "-m", "tests.distributed.test_planned_peak", name, folder, timeout_s=1500
        )
        (line,) = [line for line in printed.splitlines() if line.startswith(PRINTED)]
        _allocated[name] = json.loads(line.removeprefix(PRINTED))
    return _allocated[name]


@pytest.mark.parametrize("name", [pytest.param(each, marks=marks_of(each)) for each in SHAPES])
def test_as_much_is_planned_as_is_allocated(tmp_path: Path, name: str) -> None:
    """At real width 22 GB of free memory are needed, and some minutes."""
    allocated_bytes(name, tmp_path)


@pytest.mark.long
def test_two_context_parallel_ranks_allocate_half_each(tmp_path: Path) -> None:
    """At most 0.6 of what one process does: each reads up to a whole chunk of the vocabulary."""
    alone = allocated_bytes("actor, 8k tokens", tmp_path / "alone")
    shared = allocated_bytes("actor, 8k tokens, cp 2", tmp_path / "shared")
    for phase, peak in alone.items():
        assert shared[phase] <= 0.6 * peak, (phase, shared[phase], peak)


def exchange_in_own_buffers() -> None:
    """Let collectives use buffers that are allocated once.

    Gloo's thread may be the last one to release a tensor, and the profiler sees only what the
    calling thread frees.
    """
    buffers: dict[Any, Tensor] = {}
    exchange = dist.all_to_all_single

    def copied(received: Tensor, sent: Tensor, group: Any = None) -> None:
        key = sent.shape, sent.dtype
        if key not in buffers:
            buffers[key] = torch.empty(2, *sent.shape, dtype=sent.dtype)
        theirs, ours = buffers[key]
        ours.copy_(sent)
        exchange(theirs, ours, group=group)
        received.copy_(theirs)

    dist.all_to_all_single = copied


def main(name: str, folder: Path) -> None:
    exchange_in_own_buffers()
    shape = SHAPES[name]
    config = make_config(shape, folder / os.environ["RANK"])
    is_megatron = shape.backend == "megatron"
    runtime = LocalRuntime(DeviceKind.CPU, timeout_s=900.0, megatron=is_megatron)
    kind = TracedCritic if shape.role is Role.CRITIC else TracedActor
    group = build_group(runtime, config.layout(shape.role), kind, config, role=shape.role)
    allocated = group.call(kind.measure, *make_rows(shape)).result()[0]
    planned = role_memory(config, shape.role, 0)
    # An update includes the step of the optimizer, which the plan has as a phase of its own.
    for name, names in {"forward": ["forward"], "update": ["update", "optimizer step"]}.items():
        phases = [phase for phase in planned.phases if phase.name in names]
        wanted = max(sum(planned.on_device(phase)) + phase.total for phase in phases)
        is_plain = is_megatron and shape.layout != CP2
        least, most = (0.95, 1.1) if is_plain else (0.9, 1.15)
        peak = sum(allocated[name])
        assert least <= wanted / peak <= most, (name, wanted, peak)
    if os.environ["RANK"] == "0":
        print(PRINTED + json.dumps({phase: peak for phase, (_, peak) in allocated.items()}))
    runtime.shutdown()


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
