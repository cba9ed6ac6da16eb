"""Which outputs of a head are computed, and which have a gradient."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import linear

from mindspeed_rlxf.engine import head_outputs

TOKENS, VOCAB = 4, 6


@pytest.fixture
def batch() -> Any:
    """A micro-batch whose tokens are all trained."""
    return SimpleNamespace(
        trained_mask=None,
        trained_ids=torch.arange(TOKENS),
        prediction_places=lambda _: torch.arange(TOKENS),
        cp=None,
    )


@pytest.fixture
def head() -> Any:
    weight = torch.randn(VOCAB, 3, generator=torch.Generator().manual_seed(0))
    return SimpleNamespace(
        tp_group=SimpleNamespace(size=lambda: 1, rank=lambda: 0),
        full_hidden=lambda hidden, partial_gradient: hidden,
        output_weight=weight.requires_grad_(),
        vocab_size=VOCAB,
        linear=linear,
    )


@pytest.mark.parametrize("trains_entropy", [False, True])
def test_the_entropy_has_a_gradient_where_it_is_trained(
    batch: Any, head: Any, trains_entropy: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    slopes: list[Tensor | None] = []
    gradient = head_outputs.token_log_probs

    def observed(*arguments: Any, **keys: Any) -> Any:
        log_probs, entropy = gradient(*arguments, **keys)
        entropy.register_hook(slopes.append)
        return log_probs, entropy

    monkeypatch.setattr(head_outputs, "token_log_probs", observed)
    hidden = torch.randn(TOKENS, 3)
    read = head_outputs.read_log_probs_and_entropies
    log_probs, entropy = read(head, batch, hidden, 1.0, trains_entropy)
    (log_probs.sum() + entropy.sum()).backward()
    assert any(slope is not None for slope in slopes) is trains_entropy


def test_log_probs_alone_are_computed_without_the_entropy(
    batch: Any, head: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    hidden = torch.randn(TOKENS, 3)
    expected, _ = head_outputs.read_log_probs_and_entropies(head, batch, hidden, 1.0, False)
    computed: list[int] = []
    both = head_outputs.token_log_probs

    def observed(*arguments: Any, **keys: Any) -> Any:
        log_probs, entropy = both(*arguments, **keys)
        computed.append(entropy.numel())
        return log_probs, entropy

    monkeypatch.setattr(head_outputs, "token_log_probs", observed)
    assert torch.equal(head_outputs.read_log_probs(head, batch, hidden, 1.0), expected)
    assert computed == [0]
