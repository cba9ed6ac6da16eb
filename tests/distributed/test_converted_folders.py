"""Stock Megatron loads converted folders, roles start from them, and runs write them."""

from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest
import torch
from megatron.core import dist_checkpointing, parallel_state, tensor_parallel
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec

from mindspeed_rlxf.cli.convert import main
from mindspeed_rlxf.config.rank_layout import ParallelLayout
from mindspeed_rlxf.config.schema import ArchitectureConfig
from mindspeed_rlxf.data.batch import RoleOutput
from mindspeed_rlxf.device import megatron_versions
from mindspeed_rlxf.engine.parallel import ParallelGroups
from mindspeed_rlxf.models.parameters import Head, padded_vocab_size
from mindspeed_rlxf.models.transformer import transformer_config
from tests.distributed.groups import build_group, layout_of
from tests.distributed.llamas import (
    ONE_GROUP,
    PLAIN,
    QWEN2,
    QWEN3_MOE,
    TIED,
    make_llama,
    role_of,
    same_tensors,
    shares_groups,
)
from tests.distributed.samples import make_rollouts
from tests.distributed.test_parity_with_transformers import expected_logits
from tests.distributed.test_virtual_pipeline import Exporter


class StockModel:
    """megatron-core's own GPTModel on tensor-parallel ranks, filled by its own means."""

    def __init__(self, architecture: ArchitectureConfig, tp: int = 1) -> None:
        megatron_versions.apply_patches()
        self.architecture, self.tp = architecture, tp
        self.groups = ParallelGroups(tp, 1, seed=1)

    def logits(self, folder: Path, sharded: bool, token_ids: list[int]) -> RoleOutput:
        """[tokens, vocabulary] of one sequence."""
        model, length = self._filled(folder, sharded), len(token_ids)
        hidden = torch.ones(length, length, dtype=torch.bool).triu(1)  # what a token does not see
        with self.groups.active(), torch.no_grad():
            found = model(torch.tensor([token_ids]), torch.arange(length)[None], hidden[None, None])
            whole = tensor_parallel.gather_from_tensor_model_parallel_region(found)
        return RoleOutput(report=whole[0, :, : self.architecture.vocab_size].tolist())

    def _filled(self, folder: Path, sharded: bool) -> GPTModel:
        """Loaded strictly: no name is missing or too many."""
        a = self.architecture
        with self.groups.active():
            assert parallel_state.get_tensor_model_parallel_world_size() == self.tp
            config = transformer_config(a, self.tp)
            spec = get_gpt_layer_local_spec(
                num_experts=config.num_moe_experts,
                normalization="RMSNorm",
                qk_layernorm=config.qk_layernorm,
            )
            model = GPTModel(
                config,
                spec,
                vocab_size=padded_vocab_size(a, self.tp),
                max_sequence_length=a.max_position_embeddings,
                share_embeddings_and_output_weights=not a.untie_embeddings_and_output_weights,
                position_embedding_type="rope",
                rotary_base=int(a.rotary_base),
            ).eval()
            for parameter in model.parameters():
                torch.nn.init.constant_(parameter, torch.nan)
            with torch.serialization.safe_globals([Namespace]):
                if sharded:
                    loaded = dist_checkpointing.load(
                        {"model": model.sharded_state_dict()}, str(folder / "iter_0000001")
                    )["model"]
                else:
                    rank = f"mp_rank_{self.groups.tp.rank():02d}"
                    file = folder / "iter_0000001" / rank / "model_optim_rng.pt"
                    loaded = torch.load(file, weights_only=True)["model"]
            model.load_state_dict(loaded, strict=True)
        return model


@pytest.mark.parametrize(
    ("architecture", "tp"),
    [
        pytest.param(PLAIN, 1, id="plain"),
        pytest.param(TIED, 1, id="tied"),
        pytest.param(QWEN2, 1, id="qwen2"),
        pytest.param(QWEN3_MOE, 1, id="qwen3-moe"),
        pytest.param(ONE_GROUP, 2, id="shared-group", marks=[pytest.mark.long, shares_groups]),
    ],
)
def test_stock_megatron_loads_both_formats_strictly_and_computes_what_transformers_does(
    warm_runtime: Any, tmp_path: Path, architecture: ArchitectureConfig, tp: int
) -> None:
    model = make_llama(tmp_path / "hf", architecture)
    tokens = make_rollouts().response_ids[0].tolist()
    with torch.no_grad():
        expected = model(torch.tensor([tokens])).logits[0]
    group = build_group(warm_runtime, ParallelLayout(tp, tp), StockModel, architecture, tp)
    for kind in ("torch", "torch_dist"):
        target, options = tmp_path / kind, ["--to", "mg", "--format", kind, "--tp", str(tp)]
        assert main([str(tmp_path / "hf"), str(target), *options]) == 0
        got = group.call(StockModel.logits, target, kind == "torch_dist", tokens).result()[0]
        error = (torch.tensor(got) - expected).abs().max() / expected.abs().max()
        assert error < 2e-5, f"{kind}: {error:.2e}"


@pytest.mark.parametrize("kind", ["torch", "torch_dist"])
@pytest.mark.parametrize("scored", [False, True], ids=["logits", "scores"])
def test_a_role_starts_from_a_folder_of_another_layout(warm_runtime, tmp_path, kind, scored):
    """Written for four tensor-parallel ranks, more than there are query groups, and loaded by two
    stages; the run's own folder as well."""
    model = make_llama(tmp_path / "hf", PLAIN, scored)
    folder, options = tmp_path / "mg", ["--to", "mg", "--format", kind, "--tp", "4"]
    assert main([str(tmp_path / "hf"), str(folder), *options]) == 0
    rollouts = make_rollouts()
    expected = expected_logits(model, rollouts, scored)
    head = Head.SCORE if scored else Head.LANGUAGE_MODEL
    method = Exporter.scores if scored else Exporter.logits
    for load, out in ((folder, "run"), (tmp_path / "run" / "megatron", "again")):
        layout = {"pipeline_model_parallel_size": 2}
        role = role_of(load, PLAIN, **layout)
        group = build_group(warm_runtime, layout_of(role), Exporter, role, head)
        got = torch.tensor(group.call(method, rollouts).result()[0])
        error = (got - expected).abs().max() / expected.abs().max()
        assert error < 2e-5, f"{load}: {error:.2e}"
        group.call(Exporter.export, tmp_path / out).result()
    # What the run left in Megatron's format needs no flag.
    source, target = str(tmp_path / "again" / "megatron"), str(tmp_path / "again" / "converted")
    assert main([source, target, "--to", "hf"]) == 0
    for left in ("run/hf", "again/hf", "again/converted"):
        assert same_tensors(tmp_path / left, tmp_path / "hf"), left
