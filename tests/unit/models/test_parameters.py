"""The parameter map: names and shapes of transformers, Megatron's order, an exact tiling."""

from typing import Any

import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch import Tensor
from torch.testing import assert_close

from mindspeed_rlxf.config.schema import ArchitectureConfig
from mindspeed_rlxf.models.parameters import (
    Head,
    Split,
    StageParameter,
    hf_shapes,
    shard_slices,
    stage_parameters,
)
from tests.unit.weights.folders_of import architecture_of


def coverage(
    a: ArchitectureConfig, parameter: StageParameter, tp: int, shapes: dict[str, tuple[int, ...]]
) -> dict[str, Tensor]:
    """How many tensor-parallel ranks hold each element of each source."""
    counts = {source: torch.zeros(shapes[source], dtype=torch.int) for source in parameter.sources}
    for rank in range(tp):
        for part in shard_slices(parameter, a, rank, tp):
            counts[part.source].narrow(part.dim, part.start, part.size).add_(1)
    return counts


@settings(max_examples=40, deadline=None)
@given(
    tp=st.sampled_from([1, 2, 4]),
    groups_per_rank=st.integers(1, 2),
    ranks_per_group=st.sampled_from([1, 2, 4]),
    sizes=st.tuples(st.integers(1, 3), st.sampled_from([2, 4, 6]), st.integers(1, 3)),
    head=st.sampled_from(list(Head)),
    bias=st.booleans(),
    keys=st.fixed_dictionaries(
        {
            "vocab_size": st.integers(1, 11),
            "untie_embeddings_and_output_weights": st.booleans(),
            "qk_layernorm": st.booleans(),
            "num_experts": st.sampled_from([None, 2, 3]),
        }
    ),
)
def test_the_ranks_hold_every_element_once(
    tp: int, groups_per_rank: int, ranks_per_group: int, sizes: tuple[int, int, int],
    head: Head, bias: bool, keys: dict[str, Any],
) -> None:  # fmt: skip
    """sizes: heads of a group, numbers of a head, numbers of the MLP on a rank"""
    heads_per_group, head_dim, ffn_per_rank = sizes
    shared = min(ranks_per_group, tp)  # by that many ranks is each group
    a = architecture_of(
        "llama",
        add_qkv_bias=bias and keys["num_experts"] is None,
        num_layers=1,
        hidden_size=5,
        num_query_groups=tp // shared * (groups_per_rank if shared == 1 else 1),
        num_attention_heads=tp * groups_per_rank * heads_per_group,
        kv_channels=head_dim * shared,  # so that the rows of keys and values divide too
        ffn_hidden_size=tp * ffn_per_rank,
        **keys,
    )
    shapes = hf_shapes(a, head)
    seen = set()
    for parameter in stage_parameters(a, head):
        copies = tp if parameter.split is Split.REPLICATED else 1
        for source, count in coverage(a, parameter, tp, shapes).items():
            assert source not in seen, f"{source} is in two parameters"
            assert (count == copies).all(), source
            seen.add(source)
    assert seen == set(shapes)


def shard(
    parameter: StageParameter, a: ArchitectureConfig, tensors: dict[str, Tensor], rank: int, tp: int
) -> Tensor:
    parts = shard_slices(parameter, a, rank, tp)
    pieces = [tensors[p.source].narrow(p.dim, p.start, p.size) for p in parts]
    return torch.cat(pieces, dim=parts[0].dim)


@pytest.mark.parametrize("tp", [1, 2, 4, 8, 16])  # 4 groups, 96 rows
def test_query_key_value_rows_are_interleaved_by_group_as_megatron_splits_them(tp: int) -> None:
    # Megatron views its output as [groups, (queries of the group, key, value), head_dim]
    a = architecture_of("llama")
    name = "decoder.layers.0.self_attention.linear_qkv.weight"
    (parameter,) = (p for p in stage_parameters(a, Head.LANGUAGE_MODEL) if p.name == name)
    shapes = hf_shapes(a, Head.LANGUAGE_MODEL)
    tensors = {s: torch.randn(shapes[s]) for s in parameter.sources}
    query, key, value = (tensors[s].view(4, -1, 6, 16) for s in parameter.sources)
    whole = torch.cat((query, key, value), dim=1).view(-1, 16)
    for rank, expected in enumerate(whole.chunk(tp)):
        assert_close(shard(parameter, a, tensors, rank, tp), expected, rtol=0, atol=0)
