"""Runs resume from the sharded checkpoints that older versions wrote by megatron-core."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory
from torch.utils._pytree import tree_leaves

from mindspeed_rlxf.config.rank_layout import ParallelLayout
from mindspeed_rlxf.config.schema import OptimizerConfig
from mindspeed_rlxf.data.batch import RoleOutput
from mindspeed_rlxf.engine import train_state
from mindspeed_rlxf.engine.adam_state import adam_states
from mindspeed_rlxf.engine.engine import MegatronEngine
from mindspeed_rlxf.engine.sharded_files import save_sharded
from mindspeed_rlxf.engine.train_engine import TrainEngine
from mindspeed_rlxf.models.parameters import Head
from mindspeed_rlxf.weights.role_state import file_of
from mindspeed_rlxf.weights.state_files import Loaded
from tests.distributed.groups import build_group
from tests.distributed.llamas import QWEN3_MOE, make_llama, role_of
from tests.distributed.test_resume import whole_tensors
from tests.distributed.test_resume_streams import save


class Older:
    """A role in bf16 that can save as older versions did."""

    def __init__(self, folder: Path, tp: int, ep: int, distributed: bool) -> None:
        layout = {"tensor_model_parallel_size": tp, "expert_model_parallel_size": ep, "bf16": True}
        role = role_of(folder, QWEN3_MOE, **layout)
        optimizer = OptimizerConfig(lr=0.01, use_distributed_optimizer=distributed)
        self.engine = MegatronEngine(role, Head.LANGUAGE_MODEL, 1, optimizer)

    def step(self) -> RoleOutput:
        """Two steps of Adam on random gradients that replicas and split norms agree in."""
        engine = self.engine
        assert engine.optimizer is not None
        torch.manual_seed(3)
        with engine.groups.active():
            for _ in range(2):
                for parameter in engine.module.parameters():
                    parameter.main_grad.normal_()
                engine._guarded.step([])
        return RoleOutput()

    def save_older(self, folder: Path) -> RoleOutput:
        """Without the distributed optimizer: every state beside its parameter."""
        engine = self.engine
        with engine.groups.active():
            places = [
                place
                for chunk in engine.chunks
                for place in tree_leaves(chunk.sharded_state_dict())
                if isinstance(place, (ShardedTensor, ShardedTensorFactory))
            ]
            by_parameter = {id(place.data): place for place in places}
            state: dict[str, Any] = {"weights": dict(enumerate(places))}
            for number, held in enumerate(adam_states(engine.optimizer)):
                place = by_parameter[id(held.parameter)]
                for name, tensor in held.tensors.items():
                    keys = {"key": f"optimizer.state.{name}.{place.key}", "data": tensor}
                    if isinstance(place, ShardedTensor):
                        keys["dtype"] = tensor.dtype
                    state.setdefault(name, {})[number] = replace(place, **keys)
            folder.mkdir(exist_ok=True)
            torch.distributed.barrier()
            save_sharded(state, folder)
            numbers = train_state.saved_numbers(engine.state)
        (folder / train_state.STATE).write_text(json.dumps(numbers))
        return RoleOutput()


def test_an_older_checkpoint_is_resumed_in_another_layout(warm_runtime, tmp_path):
    """Experts, a padded vocabulary, query groups and gated layers, from two tensor-parallel ranks
    to two replicas with half of the experts and of the states each."""
    make_llama(tmp_path / "model", QWEN3_MOE)
    group = build_group(warm_runtime, ParallelLayout(2), Older, tmp_path / "model", 2, 1, False)
    group.call(Older.step).result()
    group.call(Older.save_older, tmp_path / "older").result()
    save(group, tmp_path / "written")
    assert (tmp_path / "older" / ".metadata").exists()
    resumed = build_group(warm_runtime, ParallelLayout(2), Older, tmp_path / "model", 1, 2, True)
    loaded = resumed.call_engine(TrainEngine.load_state, tmp_path / "older").result()
    assert loaded == [Loaded(same_layout=False)] * 2
    save(resumed, tmp_path / "resumed")
    expected, found = (whole_tensors(tmp_path / name) for name in ("written", "resumed"))
    assert found.keys() == expected.keys() and len({n.split("/")[0] for n in found}) == 4
    assert [name for name, tensor in expected.items() if not found[name].equal(tensor)] == []
    sizes = [file_of(tmp_path / "resumed", rank).stat().st_size for rank in range(2)]
    assert max(sizes) < 1.2 * min(sizes), "replicas share the work"
    numbers = [json.loads((tmp_path / n / "state.json").read_text()) for n in ("older", "resumed")]
    assert [n["optimizer_steps"] for n in numbers] == [2, 2]
