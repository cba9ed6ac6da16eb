"""The first update is the same in every layout: gradients of actor and critic.

Adam's step is made nearly linear by a huge epsilon, lr * g / (|g| + eps) with lr = eps, so that the
difference of the exported weights is the gradient that the optimizer saw - after micro-batches,
data, tensor and pipeline parallel reduction, and through the distributed optimizer where it is on.
"""

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from mindspeed_rlxf.config.schema import ArchitectureConfig, OptimizerConfig
from mindspeed_rlxf.engine.train_engine import TrainEngine
from mindspeed_rlxf.roles.actor import ActorGroup, ActorRole
from mindspeed_rlxf.roles.critic import CriticGroup, CriticRole
from tests.distributed.groups import update
from tests.distributed.llamas import PLAIN, QWEN2, QWEN3, SHARES_GROUPS, TIED, make_pair, run_config
from tests.distributed.samples import make_experience, make_rollouts
from tests.distributed.test_layout_invariance import PP2, SP2, TP2
from tests.unit.weights.folders_of import read_folder

EPSILON = 1e4

MB2, PADDED = {"micro_batch_size": 2}, {"packed_sequences": False}
LAYOUTS: dict[str, tuple[int, dict[str, Any], bool]] = {  # processes, layout, distributed optimizer
    "micro-batch 1": (1, {"micro_batch_size": 1}, False),
    "micro-batch 2": (1, MB2, False),
    "micro-batch 4": (1, {"micro_batch_size": 4}, False),
    "uneven micro-batches": (1, {"micro_batch_size": 3}, False),
    "padded": (1, {**MB2, **PADDED}, False),
    "distributed optimizer": (1, MB2, True),
    "dp2": (2, MB2, False),
    "dp2, distributed optimizer": (2, MB2, True),
    "tp2": (2, {"micro_batch_size": 4, **TP2}, False),
    "tp2, sequence parallel": (2, {**MB2, **SP2}, False),
    "tp2, sequence parallel, padded": (2, {**MB2, **SP2, **PADDED}, True),
    "pp2": (2, {**MB2, **PP2}, False),
    "pp2, padded": (2, {"micro_batch_size": 1, **PP2, **PADDED}, True),
}
QWEN_LAYOUTS = {
    "tp2": (2, TP2, False),
    "tp2 pp2, sequence parallel, distributed optimizer": (4, {**SP2, **PP2}, True),
}
if SHARES_GROUPS:  # each by two ranks
    tp4 = {**SP2, "tensor_model_parallel_size": 4}
    QWEN_LAYOUTS["tp4, sequence parallel"] = (4, tp4, False)


@pytest.mark.parametrize(
    ("architecture", "kind", "layouts"),
    [
        pytest.param(PLAIN, "actor", LAYOUTS, id="untied actor"),
        pytest.param(TIED, "critic", LAYOUTS, id="tied critic"),
        pytest.param(TIED, "actor", LAYOUTS, id="tied actor", marks=pytest.mark.long),
        pytest.param(PLAIN, "critic", LAYOUTS, id="untied critic", marks=pytest.mark.long),
        # biases, and norms of heads
        pytest.param(QWEN3, "actor", QWEN_LAYOUTS, id="qwen3 actor"),
        pytest.param(QWEN2, "critic", QWEN_LAYOUTS, id="qwen2 critic", marks=pytest.mark.long),
        pytest.param(QWEN2, "actor", QWEN_LAYOUTS, id="qwen2 actor", marks=pytest.mark.long),
        pytest.param(QWEN3, "critic", QWEN_LAYOUTS, id="qwen3 critic", marks=pytest.mark.long),
    ],
)
def test_first_gradients_agree_in_every_layout(warm_runtime, tmp_path, architecture, kind, layouts):
    lm, scored = make_pair(tmp_path, architecture)
    before = read_folder(lm if kind == "actor" else scored)
    reference, reference_norm = first_gradient(
        warm_runtime, tmp_path, architecture, kind, (1, {"micro_batch_size": 8}, False), before
    )
    assert reference_norm > 0.01
    for name, layout in layouts.items():
        gradient, norm = first_gradient(warm_runtime, tmp_path, architecture, kind, layout, before)
        error = (gradient - reference).norm() / reference.norm()
        assert error < 1e-5, f"{name}: {error:.2e}"
        assert norm == pytest.approx(reference_norm, rel=1e-5), name


def first_gradient(
    warm_runtime: Any, tmp_path: Path, architecture: ArchitectureConfig, kind: str,
    layout: tuple[int, dict[str, Any], bool], before: dict[str, torch.Tensor],
) -> tuple[torch.Tensor, float]:  # fmt: skip
    """All gradients in one vector, by tensor name, and the norm that the optimizer reported."""
    size, keys, distributed = layout
    optimizer = OptimizerConfig(
        lr=EPSILON, adam_eps=EPSILON, clip_grad=0.0, use_distributed_optimizer=distributed
    )
    config = run_config(
        tmp_path / "lm", tmp_path / "scored", architecture, keys, size, optimizer,
        critic={"cliprange_value": 0.5},
    )  # fmt: skip
    pool = warm_runtime.create_pools({"main": [size]})["main"]
    rollouts, target = make_rollouts(), tmp_path / "out"
    learns = ActorRole.update_policy if kind == "actor" else CriticRole.update_critic
    group = (ActorGroup if kind == "actor" else CriticGroup)(config, pool)
    group.build().result()
    report = update(group.group, learns, rollouts, make_experience(rollouts))
    group.group.call_engine(TrainEngine.export, target, None).result()
    after = read_folder(target)
    shutil.rmtree(target)
    gradient = torch.cat([(before[n] - after[n]).flatten() for n in sorted(before)])
    return gradient, report.steps[0]["grad_norm"]
