"""Recomputing activations changes no number."""

from typing import Any

import pytest

from mindspeed_rlxf.config.schema import LearningConfig
from mindspeed_rlxf.data.batch import RoleOutput, Rollouts
from mindspeed_rlxf.engine.engine import MegatronEngine
from mindspeed_rlxf.models.parameters import Head
from tests.distributed.groups import build_group, layout_of
from tests.distributed.llamas import PLAIN, QWEN3_MOE, make_llama
from tests.distributed.probe import likelihood_step
from tests.distributed.samples import make_rollouts
from tests.distributed.test_layout_invariance import PP2, SP2

WIDE = {"num_layers": 4, "hidden_size": 64, "ffn_hidden_size": 192}
DENSE, SPARSE = PLAIN.model_copy(update=WIDE), QWEN3_MOE.model_copy(update=WIDE)
FULL = {"recompute": "full"}
MODES: dict[str, dict[str, Any]] = {
    "none": {},
    "selective": {"recompute": "selective"},
    "full": FULL,
    "full, groups of 2": {**FULL, "recompute_num_layers": 2},
    "full, the first 3": {**FULL, "recompute_method": "block", "recompute_num_layers": 3},
    # In fp32 the gradients within a norm are added up before that of the residual.
    "none, bf16": {"bf16": True},
    "elementwise, bf16": {"bf16": True, "recompute": "elementwise"},
}
TP2_PP2 = {**SP2, **PP2, "micro_batch_size": 2}


class Learner:
    def __init__(self, role: LearningConfig) -> None:
        self.engine = MegatronEngine(role, Head.LANGUAGE_MODEL, 1, role.optimizer)

    def step(self, rollouts: Rollouts) -> RoleOutput:
        """One optimizer step; the weights of a rank, and the MLPs that ran in each micro-batch."""
        runs: list[int] = []
        layers = [layer for chunk in self.engine.chunks for layer in chunk.decoder.layers]
        parts = [getattr(layer.mlp, "router", layer.mlp) for layer in layers]
        hooks = [part.register_forward_hook(lambda *_: runs.append(1)) for part in parts]
        batches = self.engine.micro_batches(rollouts, range(rollouts.num_rows))
        self.engine.train_step(batches, likelihood_step(rollouts))
        for hook in hooks:
            hook.remove()
        weights = {n: t.detach().tolist() for n, t in self.engine.weights.tensors.items()}
        return RoleOutput(report=(weights, len(runs) // len(batches)))


@pytest.mark.parametrize(
    ("architecture", "layout"),
    [(DENSE, {}), (SPARSE, {}), pytest.param(DENSE, TP2_PP2, marks=pytest.mark.long)],
    ids=["dense", "experts", "tp2-pp2"],
)
def test_a_step_is_the_same_to_the_last_bit(warm_runtime, tmp_path, architecture, layout):
    make_llama(tmp_path, architecture)
    layers = 4 // layout.get("pipeline_model_parallel_size", 1)
    runs = {"selective": layers, "full": layers, "full, groups of 2": layers}
    runs |= dict.fromkeys(("none", "none, bf16", "elementwise, bf16"), 0)
    found = {}
    for name, keys in MODES.items():
        if layout and "3" in name:  # more layers than a stage has
            continue
        base = {"model": "t", "architecture": architecture, "load": str(tmp_path), "lr": 1e-2}
        role = LearningConfig(**{**base, "micro_batch_size": 8, **keys, **layout})
        group = build_group(warm_runtime, layout_of(role), Learner, role)
        weights, found[name] = group.call(Learner.step, make_rollouts()).result()[0]
        if name.startswith("none"):
            expected = weights
        assert weights == expected, name
    again = {name: count - found["none"] for name, count in found.items()}
    assert found["none"] == layers and again == {name: runs.get(name, 3) for name in found}, (
        "layers whose MLP ran once more"
    )
