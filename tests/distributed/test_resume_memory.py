"""A resumed rank reads only the slices that it needs, and unpickles nothing."""

import pickle
from pathlib import Path

import pytest
import torch

from mindspeed_rlxf.config.rank_layout import ParallelLayout
from mindspeed_rlxf.config.schema import OptimizerConfig
from mindspeed_rlxf.data.batch import RoleOutput
from mindspeed_rlxf.engine.adam_state import adam_states, single_optimizers
from mindspeed_rlxf.engine.engine import MegatronEngine
from mindspeed_rlxf.engine.train_engine import TrainEngine
from mindspeed_rlxf.models.parameters import Head
from mindspeed_rlxf.weights.role_state import BUFFER_BYTES
from tests.distributed.groups import build_group
from tests.distributed.llamas import PLAIN, make_llama, role_of
from tests.unit.weights.folders_of import sizes_read

RANKS = 4
SIZES = {"num_layers": 6, "hidden_size": 512, "ffn_hidden_size": 1536, "vocab_size": 8000}
LARGE = PLAIN.model_copy(update={**SIZES, "num_attention_heads": 8, "num_query_groups": 8})
NUMBERS = 2 * 8000 * 512 + 6 * (4 * 512 * 512 + 3 * 512 * 1536 + 2 * 512) + 512


class Saver:
    """A model in fp32 whose optimizer is distributed."""

    def __init__(self, folder: Path) -> None:
        role = role_of(folder, LARGE)
        optimizer = OptimizerConfig(lr=0.01, use_distributed_optimizer=True)
        self.engine = MegatronEngine(role, Head.LANGUAGE_MODEL, 1, optimizer)

    def step(self) -> RoleOutput:
        """One step of Adam on random gradients; report: as `moments`."""
        engine = self.engine
        with engine.groups.active():
            for parameter in engine.module.parameters():
                parameter.main_grad.normal_()
            engine._guarded.step([torch.zeros(())])
        return self.moments()

    def moments(self) -> RoleOutput:
        """Report: number and sum of the moments on this rank."""
        held = adam_states(self.engine.optimizer)
        flat = torch.cat([tensor.view(-1) for each in held for tensor in each.tensors.values()])
        return RoleOutput(report=(flat.numel(), flat.sum().item()))

    def measured_load(self, folder: Path) -> RoleOutput:
        """As a role that has taken no step; report: bytes of all chunks read, of the largest."""
        for each in single_optimizers(self.engine.optimizer):
            each.optimizer.state.clear()
        with sizes_read() as sizes, pytest.MonkeyPatch.context() as patch:
            for module, name in ((pickle, "load"), (pickle, "Unpickler"), (torch, "load")):
                patch.delattr(module, name)
            self.engine.load_state(folder)
        return RoleOutput(report=(sum(sizes), max(sizes)))


@pytest.mark.long
def test_a_resume_holds_a_slice_of_the_states_and_a_bounded_buffer(warm_runtime, tmp_path):
    """Moments of 29 million numbers in fp32 are 219 MiB, of which a rank of four holds 55 MiB."""
    make_llama(tmp_path / "model", LARGE)
    group = build_group(warm_runtime, ParallelLayout(RANKS), Saver, tmp_path / "model")
    moments = group.call(Saver.step).result()
    assert sum(numbers for numbers, _ in moments) == 2 * NUMBERS
    group.call_engine(TrainEngine.begin_save, tmp_path / "state").result()
    group.call_engine(TrainEngine.end_save).result()
    found = group.call(Saver.measured_load, tmp_path / "state").result()
    assert group.call(Saver.moments).result() == moments
    weights = 4 * NUMBERS
    for (numbers, _), (read, at_once) in zip(moments, found, strict=True):
        assert at_once <= BUFFER_BYTES
        assert read == weights + 4 * numbers
    warm_runtime.end_pools()  # frees the model, which is large
