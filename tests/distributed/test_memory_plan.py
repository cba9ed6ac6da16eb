"""The planned bytes of weights, gradients and optimizer are those allocated, within 5%."""

from collections.abc import Iterable
from typing import Any

import pytest
import torch.distributed as dist
from torch import Tensor

from mindspeed_rlxf.config.enums import Role
from mindspeed_rlxf.config.schema import OptimizerConfig
from mindspeed_rlxf.data.batch import RoleOutput
from mindspeed_rlxf.engine.engine import MegatronEngine
from mindspeed_rlxf.ops.planning.memory import role_memory
from mindspeed_rlxf.roles.actor import ActorRole
from mindspeed_rlxf.roles.critic import CriticRole
from tests.distributed.groups import build_group, update
from tests.distributed.llamas import PLAIN, TIED, make_pair, run_config
from tests.distributed.samples import make_experience, make_rollouts
from tests.distributed.test_layout_invariance import PP2, TP2

LONG = pytest.mark.long
LAYOUTS: dict[str, tuple[int, dict[str, Any], bool]] = {  # processes, layout, distributed optimizer
    "fp32": (1, {}, False),
    "bf16": (1, {"bf16": True}, False),
    "dp2, distributed optimizer, fp32": (2, {}, True),
    "dp2, distributed optimizer, bf16": (2, {"bf16": True}, True),
    "tp2": (2, TP2, False),
    "pp2": (2, PP2, False),
}


class Measured:
    def measure(self: Any) -> RoleOutput:
        return RoleOutput(report=measured(self.engine))


class MeasuredActor(Measured, ActorRole): ...


class MeasuredCritic(Measured, CriticRole): ...


ADAPTERS = {"lora": {"rank": 4}}
KINDS: dict[Role, tuple[Any, Any]] = {
    Role.ACTOR_ROLLOUT: (MeasuredActor, ActorRole.update_policy),
    Role.CRITIC: (MeasuredCritic, CriticRole.update_critic),
}


def measured(engine: MegatronEngine) -> list[tuple[int, int, int]]:
    """Bytes of weights, gradients and optimizer, of every rank."""
    assert engine.optimizer is not None
    chain = getattr(engine.optimizer, "chained_optimizers", [engine.optimizer])
    adams = [part.optimizer for part in chain]
    weights = storages(engine.module.parameters())
    state = storages(v for adam in adams for s in adam.state.values() for v in s.values())
    main = storages(p for adam in adams for g in adam.param_groups for p in g["params"])
    optimizer = {**state, **{k: n for k, n in main.items() if k not in weights}}
    gradients = storages(buffer.grad_data for model in engine.models for buffer in model.buffers)
    mine = tuple(sum(held.values()) for held in (weights, gradients, optimizer))
    ranks: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(ranks, mine)
    return ranks


def storages(values: Iterable[Any]) -> dict[int, int]:
    """Address -> bytes of the memory under tensors, each once."""
    found = (v.untyped_storage() for v in values if isinstance(v, Tensor))
    return {storage.data_ptr(): storage.nbytes() for storage in found}


@pytest.mark.parametrize(
    ("role", "architecture", "keys"),
    [
        pytest.param(Role.ACTOR_ROLLOUT, TIED, {}, id="tied-actor"),
        pytest.param(Role.CRITIC, PLAIN, {}, id="critic"),
        pytest.param(Role.CRITIC, PLAIN, ADAPTERS, id="critic-adapters"),
        pytest.param(Role.CRITIC, PLAIN, {"freeze": "attention"}, id="critic-attention"),
        pytest.param(Role.ACTOR_ROLLOUT, TIED, ADAPTERS, id="tied-actor-adapters", marks=LONG),
        pytest.param(Role.ACTOR_ROLLOUT, PLAIN, {}, id="actor", marks=LONG),
        pytest.param(Role.CRITIC, TIED, {}, id="tied-critic", marks=LONG),
    ],
)
def test_plan_is_what_is_allocated(warm_runtime, tmp_path, role, architecture, keys):
    lm, scored = make_pair(tmp_path, architecture)
    rollouts = make_rollouts()
    for name, (size, layout, distributed) in LAYOUTS.items():
        optimizer = OptimizerConfig(lr=1e-3, use_distributed_optimizer=distributed)
        of_role = {role.value: keys}
        config = run_config(lm, scored, architecture, layout, size, optimizer, **of_role)
        kind, step = KINDS[role]
        group = build_group(warm_runtime, config.layout(role), kind, config, role=role)
        update(group, step, rollouts, make_experience(rollouts))
        ranks = group.call(Measured.measure).result()[0]
        for rank, real in enumerate(ranks):
            planned = role_memory(config, role, config.layout(role).pp_rank(rank))
            wanted = tuple(planned.state)
            assert wanted == pytest.approx(real, rel=0.05), f"{name}, rank {rank}"
