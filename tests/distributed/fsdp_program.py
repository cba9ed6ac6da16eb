"""Update an actor and a critic by a training engine, in processes of their own.

python -m tests.distributed.fsdp_program RANKS CASES.json ...

Each file is computed on so many ranks, one file after another, by forks of this process: importing
takes longer than most files. A case has

    lm, scored, architecture    the models
    keys        of every role
    trained     keys of actor and critic; adapters start as noise
    steps       of the update; default 1
    load        folder whose states are loaded before it; then the actor's weights are probed
    save        folder for the states after it; then one more step follows
    export      folder for the weights after it, and for adapters
    kl          True: the reference computes the KL of the vocabulary after it
    refused     functions of the model's build that do nothing; expects that the start fails
    means       True: as a torch that takes means of gradients over the ranks, not sums
    lr          of actor and critic
    out         file for the first rank's results
"""

import json
import os
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule
from torch.multiprocessing import start_processes
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

from mindspeed_rlxf.cluster.local import LocalRuntime
from mindspeed_rlxf.config.enums import DeviceKind, Role
from mindspeed_rlxf.config.schema import ArchitectureConfig, OptimizerConfig, RunConfig
from mindspeed_rlxf.data.batch import Rollouts
from mindspeed_rlxf.data.mini_batches import rank_steps
from mindspeed_rlxf.engine import offload
from mindspeed_rlxf.engine.collective_errors import gather_all
from mindspeed_rlxf.engine.fsdp import (
    engine as fsdp_engine,
    model as fsdp_model,
    optimizer as fsdp_optimizer,
    probe as fsdp_probe,
    weights as fsdp_weights,
)
from mindspeed_rlxf.engine.fsdp.optimizer import MOMENTS
from mindspeed_rlxf.engine.fsdp.state import WEIGHT
from mindspeed_rlxf.engine.train_engine import MemoryKind
from mindspeed_rlxf.models import heads
from mindspeed_rlxf.models.hf_adapters import plain_name
from mindspeed_rlxf.roles.actor import ActorRole
from mindspeed_rlxf.roles.critic import CriticRole
from mindspeed_rlxf.roles.engines import train_engine
from mindspeed_rlxf.weights.state_files import merge_rank_indexes
from tests.adapter_noise import noise
from tests.distributed.llamas import run_config
from tests.distributed.samples import make_experience, make_rollouts
from tests.processes import free_port

ADAM = OptimizerConfig(lr=1e-3, clip_grad=0.5, weight_decay=0.1)
STEPS = [list(range(8))] * 3


def config_of(case: dict[str, Any], ranks: int) -> RunConfig:
    architecture = ArchitectureConfig(**case["architecture"])
    folders = Path(case["lm"]), Path(case["scored"])
    trained = case.get("trained", {})
    sampled = {"do_sample": True, "temperature": 0.8, **trained}
    adam = ADAM.model_copy(update={"lr": case.get("lr", ADAM.lr)})
    keys = case["keys"], ranks, adam
    return run_config(*folders, architecture, *keys, actor_rollout=sampled, critic=trained)


def compute(case: dict[str, Any], rank: int, ranks: int) -> dict[str, Any]:
    """Return log-probs, values, each step's metrics, and the weights after the steps."""
    config, results = config_of(case, ranks), {}
    if "refused" in case:
        return refuse(case, config)
    rollouts = make_rollouts()
    experience = make_experience(rollouts)
    for name, role in (("actor", Role.ACTOR_ROLLOUT), ("critic", Role.CRITIC)):
        layout = config.layout(role)
        mine = layout.dp_rank(rank)
        each = 8 // layout.dp
        part = rollouts.select(range(mine * each, (mine + 1) * each))
        share = rank_steps(STEPS[: case.get("steps", 1)], 8, layout.dp)[mine]
        rows = rollouts.select(share.rows), experience.select(share.rows), share.steps
        if role is Role.ACTOR_ROLLOUT:
            actor = ActorRole(config)
            engine: Any = actor.engine
            update: Any = actor.update_policy
        else:
            critic = CriticRole(config)
            engine, update = critic.engine, critic.update_critic
        if "load" in case:
            loaded = engine.load_state(Path(case["load"]) / name)
            results[f"{name}.loaded"] = [loaded.problem, loaded.same_layout]
            results[f"{name}.state"] = state_of(engine)
            if role is Role.ACTOR_ROLLOUT:
                results["sent unchanged"] = probe(actor, rollouts.select(range(4)))
        if role is Role.ACTOR_ROLLOUT:
            found = engine.log_probs(part, 0.8)
            outputs = found.log_probs if found else None
        else:
            read, scores = engine.values(part), engine.scores(part)
            outputs = read.values if read else None
            results["scores"] = gather(scores.scores if scores else None)
        results[f"{name}.outputs"] = gather(outputs)
        if "lora" in trained_keys(case):
            results[f"{name}.sent"] = merged(engine)
        if "max_tokens_per_micro_batch" in case["keys"]:
            batches = engine.micro_batches(rows[0], share.steps[0])
            results[f"{name}.tokens"] = [batch.token_ids.numel() for batch in batches]
        is_sharded = case["keys"].get("backend") == "fsdp"
        with counting_unsharded_gradients(engine) if is_sharded else nullcontext([]) as counts:
            results[f"{name}.steps"] = update(*rows).report.steps
        results[f"{name}.unsharded"] = counts
        results[f"{name}.weights"] = merged(engine)
        if role is Role.ACTOR_ROLLOUT and "lora" in trained_keys(case):
            with engine.without_adapters():
                base = engine.log_probs(part, 0.8)
            results["reference"] = gather(base.log_probs if base else None)
            both = engine.log_probs_with_kl(part, 0.8, engine)
            results["kl"] = gather(both.kl if both else None)
        if "save" in case:
            folder = Path(case["save"]) / name
            results[f"{name}.state"] = state_of(engine)
            with pytest.raises(OSError, match="rank 1: OSError: full"):
                broken = patch.object(Path, "mkdir", side_effect=OSError("full"))
                with broken if rank == 1 else nullcontext():
                    engine.begin_save(folder)
            engine.begin_save(folder)
            results[f"{name}.more"] = update(*rows[:2], share.steps[:1]).report.steps
            engine.end_save()
            results[f"{name}.last"] = merged(engine)
            if rank == 0:
                merge_rank_indexes(folder, ranks)
            dist.barrier()
        if "kl" in case and role is Role.ACTOR_ROLLOUT:
            reference = train_engine(config, Role.REF)
            compared = reference.log_probs_with_kl(part, 0.8, engine)
            results["kl"] = gather(compared.kl if compared else None)
        if "export" in case:
            adapters = [Path(case["export"]) / f"{name}_adapter"] * ("lora" in trained_keys(case))
            engine.export(Path(case["export"]) / name, None, *adapters)
    return results


def refuse(case: dict[str, Any], config: RunConfig) -> dict[str, Any]:
    """Return the error of an engine whose model has the properties `refused`."""
    always: dict[str, Any] = {name: lambda model: True for name in case["refused"]}
    with ExitStack() as stack:
        for module in (fsdp_model, fsdp_engine, fsdp_probe) if always else ():
            stack.enter_context(patch.multiple(module, create=True, **always))
        try:
            ActorRole(config)
        except ValueError as error:
            return {"error": str(error)}
    return {"error": "none"}


@contextmanager
def counting_unsharded_gradients(engine: Any) -> Iterator[list[int]]:
    """Yield a list that gets the elements of whole gradients on this rank before each pass."""
    counts: list[int] = []
    run = engine.run

    def count_and_run(*arguments: Any) -> Any:
        groups = [
            module._get_fsdp_state()._fsdp_param_group
            for module in engine.model.modules()
            if isinstance(module, FSDPModule)
        ]
        gradients = [
            parameter.unsharded_param.grad
            for group in groups
            for parameter in (group.fsdp_params if group is not None else ())
            if hasattr(parameter, "_unsharded_param")  # a pass has gathered it
        ]
        counts.append(sum(grad.numel() for grad in gradients if grad is not None))
        return run(*arguments)

    with patch.object(engine, "run", count_and_run):
        yield counts


def probe(actor: ActorRole, rows: Rollouts) -> list[str]:
    """Probe the weights while a server needs the device; return what is sent unchanged."""
    before = {name: tensor.clone() for name, tensor in sent_tensors(actor.engine)}
    actor.begin_probe(rows)
    unchanged = [n for n, tensor in sent_tensors(actor.engine) if tensor.equal(before[n])]
    with offload.holding():
        actor.end_probe()
    return unchanged


def sent_tensors(engine: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield what generating ranks get: the weights, and adapters beside them."""
    yield from engine.hf_tensors()
    yield from engine.adapter_tensors()


def merged(engine: Any) -> dict[str, torch.Tensor]:
    """Return copies of an engine's weights, with adapters merged."""
    stream = getattr(engine, "_merged_tensors", engine.hf_tensors)
    return {name: tensor.clone().cpu() for name, tensor in stream()}


def trained_keys(case: dict[str, Any]) -> dict[str, Any]:
    return case.get("trained", {})  # type: ignore[no-any-return]


def state_of(engine: Any) -> dict[str, torch.Tensor]:
    """Return the whole tensors of an engine's state, and its steps."""
    found = {"steps": torch.tensor(gather_all([engine.optimizer.steps]))}
    trained = {plain_name(name) for name in engine._trained}
    shards = [shard for shard in engine.shards if shard.name in trained]
    with engine.holding(MemoryKind.WEIGHTS, MemoryKind.OPTIMIZER):
        own = engine.state._tensors()  # of parameters with rows on this rank
        for kind in (WEIGHT, *MOMENTS):
            for shard in shards:
                key = f"{kind}/{shard.name}"
                rows = own[key][1] if key in own else shard.local
                found[key] = replace(shard, local=rows).gather().clone()
    return found


def gather(part: torch.Tensor | None) -> torch.Tensor:
    """Concatenate the leaders' rows, in the order of the ranks."""
    parts: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(parts, part)
    return torch.cat([found for found in parts if found is not None])


def run_cases(rank: int, ranks: int, port: int, file: str) -> None:
    """Compute the cases of a file, as one rank; the first rank writes the results."""
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(ranks), "MASTER_PORT": str(port)}
    cases = json.loads(Path(file).read_text())
    heads.CHUNK_TOKENS = 8  # so that these few tokens take several chunks
    megatron = cases[0]["keys"].get("backend") != "fsdp"
    runtime = LocalRuntime(DeviceKind.CPU, timeout_s=60.0, megatron=megatron)
    fsdp_weights.initial_values = noise
    for case in cases:
        with ExitStack() as stack:
            for module in (fsdp_model, fsdp_optimizer) if "means" in case else ():
                stack.enter_context(patch.object(module, "sums_gradients", lambda: False))
            results = compute(case, runtime.rank, runtime.size)
        if runtime.is_first:
            torch.save(results, case["out"])
    if not megatron:
        loaded = [name for name in sys.modules if name.startswith("megatron.core")]
        assert not loaded, f"{loaded[0]} was imported"
    runtime.shutdown()


def main(*words: str) -> None:
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "OMP_NUM_THREADS": "1"}
    list(MODEL_FOR_CAUSAL_LM_MAPPING)  # imports what each fork would
    for ranks, file in zip(map(int, words[::2]), words[1::2], strict=True):
        # Raises the first error of a rank, and ends the others.
        start_processes(run_cases, (ranks, free_port(), file), ranks, start_method="fork")


if __name__ == "__main__":
    main(*sys.argv[1:])
