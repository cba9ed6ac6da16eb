"""All ranks skip a step whose loss or gradient is not finite, as if it had never been computed.

The same engine also writes a checkpoint by megatron-core, which our reader of pickles must accept.
"""

import math
import pickle
from argparse import Namespace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing import ShardedObject
from megatron.core.enums import ModelType

from mindspeed_rlxf.algorithms.losses import LossOutput, Mean
from mindspeed_rlxf.cluster.errors import WorkerError
from mindspeed_rlxf.cluster.group import RoleGroup
from mindspeed_rlxf.config.rank_layout import ParallelLayout
from mindspeed_rlxf.config.schema import OptimizerConfig, RoleConfig
from mindspeed_rlxf.data.batch import RoleOutput, Rollouts
from mindspeed_rlxf.device import megatron_versions
from mindspeed_rlxf.engine.engine import MegatronEngine
from mindspeed_rlxf.engine.step_guard import SkippedSteps
from mindspeed_rlxf.engine.train_engine import PolicyStep, TokenLogProbs
from mindspeed_rlxf.models.parameters import Head
from mindspeed_rlxf.weights.torch_dist import read_metadata_tensors
from tests.distributed.groups import build_group
from tests.distributed.llamas import TIED, make_llama, role_of
from tests.distributed.samples import make_rollouts

BAD_SLOPE = -1.0  # in place of a factor: the loss stays a number, its gradient does not


class Learner:
    """Takes steps on a made-up loss, which can be made wrong on one rank."""

    def __init__(self, role: RoleConfig, optimizer: OptimizerConfig, policy: str) -> None:
        skipped = SkippedSteps(policy, 1, "actor")
        self.engine = MegatronEngine(role, Head.LANGUAGE_MODEL, 1, optimizer, 9, skipped)

    def learn(self, rollouts: Rollouts, factors: list[float], rank: int) -> RoleOutput:
        """One step for each factor of the loss, 1 on all ranks but one; returns their metrics."""
        found = []
        for factor in factors:
            batches = self.engine.micro_batches(rollouts, range(rollouts.num_rows))
            own = factor if torch.distributed.get_rank() == rank else 1.0
            step = PolicyStep(partial(_loss, own), temperature=1.0)
            found.append(self.engine.train_step(batches, step))
        weights = {n: p.float().tolist() for n, p in self.engine.module.named_parameters()}
        optimizer: Any = self.engine.optimizer
        state = [p.tolist() for group in optimizer.param_groups for p in group["params"]]
        return RoleOutput(report=(found, weights, state))

    def save(self, folder: Path) -> RoleOutput:
        """What Megatron's own training loop writes."""
        engine = self.engine
        assert engine.optimizer is not None and engine.scheduler is not None
        with engine.groups.active():
            model = engine.chunks[0].sharded_state_dict()
            how: dict[str, Any] = {"metadata": {"distrib_optim_sharding_type": "fully_reshardable"}}
            if megatron_versions.is_before_0_13():
                how = {"sharding_type": "dp_zero_gather_scatter"}  # the other one needs numpy 1
            random = [{"torch": torch.get_rng_state()}]
            rank, size = torch.distributed.get_rank(), torch.distributed.get_world_size()
            state = {
                "args": Namespace(dtype=torch.bfloat16, model_type=ModelType.encoder_or_decoder),
                "model": model,
                "optimizer": engine.optimizer.sharded_state_dict(model, **how),
                "opt_param_scheduler": engine.scheduler.state_dict(),
                "rng_state": ShardedObject("rng_state", random, (size,), (rank,)),
            }
            folder.mkdir(exist_ok=True)
            torch.distributed.barrier()
            # Not its plain save: in 0.12 that one forks, and here nothing may (`InProcess`).
            request = dist_checkpointing.save(state, str(folder), async_sharded_save=True)
            assert request is not None
            request.execute_sync()
        return RoleOutput()


def _loss(factor: float, rows: list[int], tokens: TokenLogProbs) -> LossOutput:
    log_probs = tokens.log_probs
    loss = log_probs.square().sum()
    if factor == BAD_SLOPE:
        loss = loss + (log_probs * 0).sum().sqrt()  # plus 0, whose slope is inf * 0
    else:
        loss = loss * factor
    return LossOutput(loss, len(log_probs), {"loss": Mean.of(loss, len(log_probs))})


def group_of(runtime: Any, folder: Path, policy: str, bf16: bool) -> RoleGroup:
    role = role_of(folder, TIED, bf16=bf16)
    optimizer = OptimizerConfig(lr=0.01, use_distributed_optimizer=bf16)
    return build_group(runtime, ParallelLayout(2), Learner, role, optimizer, policy)


@pytest.mark.parametrize("bf16", [False, True], ids=["fp32", "bf16-distributed-optimizer"])
def test_a_skipped_step_leaves_no_trace_on_any_rank(warm_runtime, tmp_path, bf16):
    make_llama(tmp_path / "start", TIED)
    rollouts = make_rollouts()

    def learn(factors: list[float]) -> tuple[RoleGroup, Any]:
        group = group_of(warm_runtime, tmp_path / "start", "skip", bf16)
        return group, group.call(Learner.learn, rollouts, factors, 1).result()

    _, straight = learn([1.0, 2.0])
    group, skipping = learn([1.0, math.nan, 2.0, BAD_SLOPE])
    for rank in range(2):
        (steps, *expected), (tried, *found) = straight[rank], skipping[rank]
        assert found == expected, "weights, and what the optimizer holds of them"
        assert [step["skipped_steps"] for step in tried] == [0, 1, 0, 1]
        norms = [step["grad_norm"] for step in tried]
        assert norms[::2] == [step["grad_norm"] for step in steps]
        assert not any(map(math.isfinite, norms[1::2]))
    message = "actor: the gradient norm of mini-batch 5 of iteration 1 must be .*max_skipped=1"
    with pytest.raises(WorkerError, match=message):
        group.call(Learner.learn, rollouts, [BAD_SLOPE], 0).result()


def test_what_megatron_saves_is_read(warm_runtime: Any, tmp_path: Path) -> None:
    make_llama(tmp_path / "start", TIED)
    group = group_of(warm_runtime, tmp_path / "start", "raise", bf16=True)
    folder = tmp_path / "saved"
    group.call(Learner.learn, make_rollouts(), [1.0], 0).result()  # fills the optimizer's states
    group.call(Learner.save, folder).result()
    read_metadata_tensors(folder)
    (folder / ".metadata").write_bytes(pickle.dumps(print))
    with pytest.raises(ValueError, match=r"\.metadata must .* has builtins\.print"):
        read_metadata_tensors(folder)
