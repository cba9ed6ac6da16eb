"""A rollout rank copies its own slices of whole Hugging Face tensors, each to its place."""

import re
from math import prod
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from mindspeed_rlxf.config.schema import ArchitectureConfig
from mindspeed_rlxf.models.parameters import (
    Head,
    Split,
    hf_shapes,
    shard_shape,
    shard_slices,
    stage_parameters,
)
from mindspeed_rlxf.rollout.weights import load_hf_tensors

PLAIN = ArchitectureConfig(
    num_layers=4, hidden_size=6, ffn_hidden_size=8, num_attention_heads=8, num_query_groups=4,
    kv_channels=2, vocab_size=13, max_position_embeddings=8,
    untie_embeddings_and_output_weights=True,
)  # fmt: skip
FAMILIES = {
    "plain": PLAIN,
    "tied": PLAIN.model_copy(update={"untie_embeddings_and_output_weights": False}),
    "shared groups": PLAIN.model_copy(update={"num_query_groups": 2}),  # by two ranks of four
    "biased": PLAIN.model_copy(update={"add_qkv_bias": True}),
    "experts": PLAIN.model_copy(update={"num_experts": 4, "qk_layernorm": True}),
}
LM = Head.LANGUAGE_MODEL


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("tp", [1, 2, 4])
def test_every_number_arrives_where_it_belongs(name: str, tp: int) -> None:
    """Every number of the model is another; padding of the vocabulary stays 0."""
    a, ep = FAMILIES[name], 2 if name == "experts" else 1
    first, whole = 1, {}
    for source, shape in hf_shapes(a, LM).items():
        whole[source] = torch.arange(first, first + prod(shape)).view(shape)
        first += prod(shape)
    for tp_rank in range(tp):
        for ep_rank in range(ep):
            table = list(stage_parameters(a, LM, ep_rank=ep_rank, ep=ep))
            got = {p.name: torch.zeros(shard_shape(p, a, tp), dtype=torch.int64) for p in table}
            groups: Any = SimpleNamespace(tp=group(tp_rank, tp), ep=group(ep_rank, ep))
            load_hf_tensors(got, a, groups, whole.items())
            for p in table:
                slices = shard_slices(p, a, tp_rank, tp)
                parts = [whole[s.source].narrow(s.dim, s.start, s.size) for s in slices]
                expected = torch.cat(parts, dim=slices[0].dim)
                rows = len(expected) if p.split is Split.VOCAB else len(got[p.name])
                assert torch.equal(got[p.name][:rows], expected), p.name
                assert not got[p.name][rows:].any(), p.name


K_PROJ = "model.layers.1.self_attn.k_proj.weight"
CHANGES: dict[str, Any] = {
    f"1 of 39 tensors were not sent, {K_PROJ}": lambda whole: whole.pop(K_PROJ),
    "layers.9.x is no tensor of this model": lambda whole: whole.update({"layers.9.x": None}),
    "must have the shape (8, 6), not (7, 6)": lambda w: w.update({K_PROJ: w[K_PROJ][1:]}),
}


@pytest.mark.parametrize("said", [*CHANGES, "was sent already"])
def test_a_stream_that_is_not_that_of_the_model_is_refused(said: str) -> None:
    whole: dict[str, Any] = {n: torch.ones(s) for n, s in hf_shapes(PLAIN, LM).items()}
    sent = [*whole.items()] if said not in CHANGES else []
    CHANGES.get(said, lambda _: None)(whole)
    groups: Any = SimpleNamespace(tp=group(0, 1), ep=group(0, 1))
    with pytest.raises(ValueError, match=re.escape(said)):
        load_hf_tensors({}, PLAIN, groups, [*sent, *whole.items()])


def test_parameters_that_are_not_asked_for_are_passed_over() -> None:
    """A rank with a pipeline copies those of other stages only."""
    name, groups = "decoder.final_layernorm.weight", SimpleNamespace(tp=group(0, 1), ep=group(0, 1))
    got, whole = {name: torch.zeros(6)}, {n: torch.ones(s) for n, s in hf_shapes(PLAIN, LM).items()}
    load_hf_tensors(got, PLAIN, groups, whole.items())  # type: ignore[arg-type]
    assert got[name].tolist() == [1] * 6


def group(rank: int, size: int) -> Any:
    return SimpleNamespace(rank=lambda: rank, size=lambda: size)
