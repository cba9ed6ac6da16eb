"""A rank with several chunks of the model takes any number of rows, and writes the same files."""

import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.testing import assert_close

from mindspeed_rlxf.cluster.group import Sharded
from mindspeed_rlxf.data.batch import RoleOutput
from mindspeed_rlxf.models.parameters import Head
from tests.distributed.groups import build_group, layout_of
from tests.distributed.llamas import PLAIN, TIED, make_llama, role_of
from tests.distributed.probe import EngineProbe
from tests.distributed.samples import PROMPT_LENGTHS, RESPONSE_LENGTHS, make_rollouts
from tests.distributed.test_parity_with_transformers import expected_logits
from tests.unit.weights.folders_of import read_folder

FOUR = PLAIN.model_copy(update={"num_layers": 4})
TIED_FOUR = TIED.model_copy(update={"num_layers": 4})
LM = Head.LANGUAGE_MODEL
VIRTUAL = {"pipeline_model_parallel_size": 2, "num_layers_per_virtual_pipeline_stage": 1}


class Exporter(EngineProbe):
    def export(self, folder: Path) -> RoleOutput:
        self.engine.export(folder / "hf", folder / "megatron")
        return RoleOutput()

    def group_sizes(self, rollouts: Any) -> RoleOutput:
        """Tokens of each micro-batch."""
        batches = self.engine.micro_batches(rollouts, range(rollouts.num_rows))
        return RoleOutput(report=[batch.token_ids.numel() for batch in batches])


def fill_planner_data(file: Path) -> None:
    """Megatron leaves it None, which `dcp_to_torch_save` of torch 2.7 does not expect."""
    metadata = pickle.loads(file.read_bytes())
    metadata.planner_data = metadata.planner_data or {}
    file.write_bytes(pickle.dumps(metadata))


def test_forward_takes_any_number_of_rows(warm_runtime: Any, tmp_path: Path) -> None:
    """Two stages take 2, 4, ... micro-batches: 7 rows by 3 are split, 1 or 3 by 1 are filled up."""
    model = make_llama(tmp_path, FOUR)
    for micro, counts in ((3, (7,)), (1, (1, 3))):
        role = role_of(tmp_path, FOUR, micro_batch_size=micro, **VIRTUAL)
        group = build_group(warm_runtime, layout_of(role), Exporter, role, LM)
        for count in counts:
            rollouts = make_rollouts().select(range(count))
            got = torch.tensor(group.call(EngineProbe.logits, rollouts).result()[0])
            expected = expected_logits(model, rollouts, scored=False)
            assert_close(got, expected, rtol=0, atol=2e-5 * float(expected.abs().max()))


@pytest.mark.parametrize("scored", [False, True], ids=["tied", "scored"])
def test_files_are_those_of_one_process(warm_runtime: Any, tmp_path: Path, scored: bool) -> None:
    architecture = FOUR if scored else TIED_FOUR
    make_llama(tmp_path / "start", architecture, scored)
    head = Head.SCORE if scored else Head.LANGUAGE_MODEL
    for name, layout in (("one", {}), ("two", VIRTUAL)):
        role = role_of(tmp_path / "start", architecture, **layout)
        group = build_group(warm_runtime, layout_of(role), Exporter, role, head)
        group.call(Exporter.export, tmp_path / name).result()
        group.call(Exporter.stream, tmp_path / name / "stream", 0).result()
        megatron = tmp_path / name / "megatron"
        fill_planner_data(megatron / ".metadata")
        dcp_to_torch_save(megatron, tmp_path / f"{name}.pt")
    folders = "start", "one/hf", "two/hf", "two/stream"
    start, one, two, stream = (read_folder(tmp_path / folder) for folder in folders)
    assert start.keys() == one.keys() == two.keys() == stream.keys()
    assert all(torch.equal(start[name], two[name]) for name in start)
    assert all(torch.equal(start[name], stream[name]) for name in start)
    files = [load_file(file) for file in (tmp_path / "two/hf").glob("*.safetensors")]
    assert len(files) == 2 and sum(map(len, files)) == len(start)  # a tied one is not there twice
    saved = [torch.load(tmp_path / f"{n}.pt", weights_only=False) for n in ("one", "two")]
    assert saved[0].keys() == saved[1].keys()
    norms = saved[1]["decoder.layers.self_attention.linear_qkv.layer_norm_weight"]
    names = [f"model.layers.{i}.input_layernorm.weight" for i in range(4)]
    assert torch.equal(norms.flatten(), torch.cat([start[name] for name in names]))
    for name, value in saved[0].items():
        if isinstance(value, torch.Tensor):
            assert torch.equal(value, saved[1][name]), name


def test_replicas_make_as_many_micro_batches(warm_runtime: Any, tmp_path: Path) -> None:
    """By 31 tokens each replica makes two (19 + 12, 10 + 9; 10 + 15, 10 + 11). By 30 the first one
    makes three (19, 12 + 10, 9), so the second one, which makes two, splits the first of them."""
    lengths = [p + r for p, r in zip(PROMPT_LENGTHS, RESPONSE_LENGTHS, strict=True)]
    assert lengths == [19, 12, 10, 9, 10, 15, 10, 11]
    make_llama(tmp_path, PLAIN)
    parts = [make_rollouts().select(rows) for rows in (range(4), range(4, 8))]
    for limit, first, second in ((31, [31, 19], [25, 21]), (30, [19, 22, 9], [10, 15, 21])):
        role = role_of(tmp_path, PLAIN, max_tokens_per_micro_batch=limit)
        group = build_group(warm_runtime, layout_of(role, 2), Exporter, role, LM)
        assert group.call(Exporter.group_sizes, Sharded(parts)).result() == [first, second]
