"""Every number of the model is written once, whatever the layout, and read where it belongs."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from mindspeed_rlxf.engine.hf_stream import shards
from mindspeed_rlxf.models.parameters import Head, hf_shapes, rank_parameters, shard_shape
from tests.unit.weights.folders_of import architecture_of


def rank_of(family: str, tp: tuple[int, int], pp: tuple[int, int], dp: tuple[int, int],
            ep: int = 1, chunks: int = 1) -> tuple[Any, Any]:  # fmt: skip
    """The parameters and groups of a rank; each group as (rank, size)."""
    a = architecture_of(family)
    place = (*pp, chunks, dp[0] % ep, ep)
    table = list(rank_parameters(a, Head.LANGUAGE_MODEL, *place))
    tensors = {p.name: torch.zeros(shard_shape(p, a, tp[1])) for p in table}
    groups = {
        name: SimpleNamespace(rank=lambda r=rank: r, size=lambda s=size: s)
        for name, (rank, size) in {"tp": tp, "pp": pp, "dp_cp": dp, "ep": (dp[0] % ep, ep)}.items()
    }
    weights = SimpleNamespace(
        architecture=a, table=table, tensors=tensors, trained_of=lambda found: found
    )
    return weights, SimpleNamespace(**groups)


@pytest.mark.parametrize(
    ("family", "tp", "pp", "dp", "ep", "chunks"),
    [
        ("llama", 1, 1, 1, 1, 1),
        ("llama", 4, 1, 3, 1, 1),
        ("tied", 2, 2, 2, 1, 1),
        ("tied", 2, 2, 1, 1, 2),
        ("qwen2", 2, 1, 5, 1, 1),
        ("qwen3_moe", 2, 2, 4, 2, 1),
    ],
)
def test_replicas_write_every_number_once_and_about_as_many_each(
    family: str, tp: int, pp: int, dp: int, ep: int, chunks: int
) -> None:
    a = architecture_of(family)
    times = {name: torch.zeros(s) for name, s in hf_shapes(a, Head.LANGUAGE_MODEL).items()}
    for t in range(tp):
        for p in range(pp):
            by_replica = []
            for d in range(dp):
                weights, groups = rank_of(family, (t, tp), (p, pp), (d, dp), ep, chunks)
                written = 0
                for shard in shards(weights, groups):
                    flat = torch.ones(len(shard.written))
                    for held in shard.held_chunks("weight", flat, shard.written):
                        times[held.name][held.chunk.slices] += held.tensor
                        written += held.chunk.numel
                by_replica.append(written)
            total = sum(by_replica)
            # Padding and what other ranks write lie somewhere on the line that replicas share.
            assert max(by_replica) <= total / dp + 0.25 * total, by_replica
    assert all(bool((count == 1).all()) for count in times.values())
