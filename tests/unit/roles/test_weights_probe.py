"""A tensor that an engine did not take shows in the log-probs of changed weights."""

from collections.abc import Iterable
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    OPTConfig,
    Qwen2Config,
    Qwen3MoeConfig,
)

from mindspeed_rlxf.data.batch import LogProbs
from mindspeed_rlxf.models.adapter_parameters import initial_values, merge
from mindspeed_rlxf.models.hf_names import find_pieces
from mindspeed_rlxf.roles.weights_probe import ChangedWeights, ProbeReport, probe_rows

VOCAB, EXPERTS = 500, 20
SHAPE: dict[str, Any] = {
    "vocab_size": VOCAB, "hidden_size": 64, "intermediate_size": 160, "num_attention_heads": 4,
    "num_key_value_heads": 2, "initializer_range": 0.08,
}  # fmt: skip
MODELS = {
    "llama": LlamaConfig(
        num_hidden_layers=8, **{**SHAPE, "hidden_size": 256, "initializer_range": 0.02}
    ),
    "biases": Qwen2Config(num_hidden_layers=1, **SHAPE),
    "experts": Qwen3MoeConfig(
        num_hidden_layers=2, head_dim=16, num_experts=EXPERTS, num_experts_per_tok=1,
        moe_intermediate_size=32, **SHAPE,
    ),
    "learned positions": OPTConfig(
        vocab_size=VOCAB, hidden_size=64, ffn_dim=160, num_attention_heads=4, init_std=0.08,
        num_hidden_layers=2, word_embed_proj_dim=64, max_position_embeddings=128,
    ),
}  # fmt: skip


class Scorer:
    """A training engine of one rank with a random model."""

    def __init__(self, name: str, dtype: torch.dtype = torch.float32) -> None:
        torch.manual_seed(0)
        self.model: Any = AutoModelForCausalLM.from_config(MODELS[name], dtype=dtype).eval()
        self.model.requires_grad_(False)
        self.weights = list(self.model.parameters())
        pieces = find_pieces(self.model)
        self.stream = {
            piece.name: piece.view(weight)
            for key, weight in self.model.named_parameters()
            for piece in pieces[key]
        }
        self.originals = {key: tensor.clone() for key, tensor in self.stream.items()}
        actor: Any = SimpleNamespace(architecture=SimpleNamespace(vocab_size=VOCAB))
        self.rows = probe_rows(64, actor)

    def changing_weights(self) -> Any:
        return nullcontext(self.weights)

    def log_probs(self, rows: Any, temperature: float) -> Any:
        ids, start = torch.cat((rows.prompt_ids, rows.response_ids), 1), rows.prompt_ids.size(1)
        logs = self.model(ids).logits[:, start - 1 : -1].float().log_softmax(-1)
        return LogProbs(logs.gather(-1, ids[:, start:, None])[..., 0])

    def change(self) -> ProbeReport:
        report = ChangedWeights(self, self.model.dtype).change(self.rows)  # type: ignore[arg-type]
        assert report is not None
        return report

    def misses(self, report: ProbeReport, stale: Iterable[str]) -> bool:
        """Whether the probe does not see that these tensors are still the old ones."""
        changed = {name: self.stream[name].clone() for name in stale}
        for name in changed:
            self.stream[name].copy_(self.originals[name])
        gap = report.gap(self.log_probs(self.rows, 1.0).log_probs.tolist())
        for name, tensor in changed.items():
            self.stream[name].copy_(tensor)
        return gap <= report.limit

    def tokens_of_experts(self) -> dict[str, int]:
        """Return expert -> tokens of the probe that reach it.

        In the last layer only those tokens count that predict one of a response.
        """
        ids, start = torch.cat((self.rows.prompt_ids, self.rows.response_ids), 1), 32
        first, last = self.model(ids, output_router_logits=True).router_logits
        reached = [first.view(*ids.shape, -1)[:, :-1], last.view(*ids.shape, -1)[:, start - 1 : -1]]
        return {
            f"model.layers.{layer}.mlp.experts.{expert}.": int((logits.argmax(-1) == expert).sum())
            for layer, logits in enumerate(reached)
            for expert in range(EXPERTS)
        }


# It adds the same to a query's product with every key, unless positions rotate keys.
UNSEEN = {
    "learned positions": {f"model.decoder.layers.{n}.self_attn.k_proj.bias" for n in range(2)}
}


@pytest.mark.parametrize("name", [name for name in MODELS if name != "experts"])
def test_each_stale_tensor_is_seen_but_for_those_that_change_no_log_prob(name: str) -> None:
    """`docs/running.md` lists what is not seen; receipts compare the bits of these tensors too."""
    scorer = Scorer(name)
    report = scorer.change()
    middle = tuple(f"model.layers.{n}." for n in range(1, 7))
    stale = [tensor for tensor in scorer.stream if not tensor.startswith(middle)]
    assert len(stale) > 13
    missed = {tensor for tensor in stale if scorer.misses(report, [tensor])}
    assert missed == UNSEEN.get(name, set())


def test_a_stale_expert_is_seen_if_tokens_reach_it() -> None:
    scorer = Scorer("experts")
    report, counts = scorer.change(), scorer.tokens_of_experts()
    missed = {tensor for tensor in scorer.stream if scorer.misses(report, [tensor])}
    idle = tuple(expert for expert, count in counts.items() if count == 0)
    rare = tuple(expert for expert, count in counts.items() if count < 4)
    assert 0 < len(idle) < len(rare) < len(counts)
    assert missed >= {tensor for tensor in scorer.stream if tensor.startswith(idle)}
    assert all(tensor.startswith(rare) for tensor in missed)


def test_in_bf16_rounding_hides_no_kind_of_tensor() -> None:
    scorer = Scorer("llama", torch.bfloat16)
    report = scorer.change()
    assert report.noise > 1e-3, "measured, not assumed"
    kinds = {name.split(".", 3)[-1] for name in scorer.stream if name.startswith("model.layers.0.")}
    stale = [[f"model.layers.0.{kind}"] for kind in kinds]
    stale += [["model.embed_tokens.weight"], ["model.norm.weight"], ["lm_head.weight"]]
    stale += [[name for name in scorer.stream if "q_proj" in name or "k_proj" in name]]
    assert [names for names in stale if scorer.misses(report, names)] == []
    assert scorer.misses(report, [])


def test_a_stale_adapter_is_seen_though_it_was_zero() -> None:
    """B is 0 before the first update, and the stream has the merged weight."""
    scorer = Scorer("biases")
    weight = scorer.model.model.layers[0].self_attn.q_proj.weight
    a = initial_values("q_proj.lora_A.weight", (8, 64), 0)
    b = initial_values("q_proj.lora_B.weight", (64, 8), 0)
    first_b = b.clone()
    scorer.weights += [a, b]
    scorer.change()
    base = weight.clone()
    merge(weight, a, b, 2.0)
    log_probs = scorer.log_probs(scorer.rows, 1.0).log_probs.tolist()
    report = ProbeReport(log_probs, noise=0.0)
    weight.copy_(base)
    merge(weight, a, first_b, 2.0)
    assert report.gap(scorer.log_probs(scorer.rows, 1.0).log_probs.tolist()) > report.limit


def test_the_weights_come_back_bit_by_bit() -> None:
    scorer = Scorer("biases", torch.bfloat16)
    changed = ChangedWeights(scorer, torch.bfloat16)  # type: ignore[arg-type]
    changed.change(scorer.rows)
    assert not any(map(torch.equal, scorer.stream.values(), scorer.originals.values()))
    changed.restore()
    assert all(map(torch.equal, scorer.stream.values(), scorer.originals.values()))


def test_copies_on_other_ranks_stay_copies() -> None:
    """As a tied embedding on two stages: the change depends on the rank's own tensor alone."""
    first, second = Scorer("llama"), Scorer("llama")
    second.weights.reverse()
    for scorer in (first, second):
        scorer.change()
    assert all(map(torch.equal, first.stream.values(), second.stream.values()))
    matrix: Tensor = first.stream["model.layers.0.mlp.up_proj.weight"]
    assert abs(matrix.mean() / matrix.std()) < 0.05
