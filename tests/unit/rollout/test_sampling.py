"""Token choice against transformers' filters and against the probabilities themselves."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.testing import assert_close
from transformers import TopKLogitsWarper, TopPLogitsWarper

from mindspeed_rlxf.rollout.sampling import (
    SamplingSettings,
    _filtered,
    choose_tokens,
    uniform_numbers,
)

EOS = (3, 5)


def settings(**keys: Any) -> SamplingSettings:
    base: dict[str, Any] = {
        "do_sample": True,
        "temperature": 1.0,
        "top_k": 0,
        "top_p": 1.0,
        "min_new_tokens": 0,
        "max_new_tokens": 8,
        "eos_token_ids": EOS,
    }
    return SamplingSettings(**(base | keys))


def random_logits(rows: int, vocab: int, seed: int = 0) -> Tensor:
    return torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed)) * 2


def choose(
    logits: Tensor, uniforms: Tensor | float, generated: int = 0, **keys: Any
) -> tuple[Tensor, Tensor]:
    rows = logits.size(0)
    numbers = torch.as_tensor(uniforms, dtype=torch.float64).expand(rows)
    return choose_tokens(logits, numbers, torch.full((rows,), generated), settings(**keys))


def test_greedy_takes_the_largest_logit_and_ignores_temperature() -> None:
    logits = random_logits(6, 9)
    tokens, log_probs = choose(logits, 0.0, do_sample=False, temperature=0.1)
    assert tokens.tolist() == logits.argmax(-1).tolist()
    assert_close(log_probs, torch.log_softmax(logits, -1).amax(-1))


@pytest.mark.parametrize("top_k", [1, 3, 9, 20])
def test_top_k_keeps_what_transformers_keeps(top_k: int) -> None:
    logits = random_logits(5, 9)
    expected = TopKLogitsWarper(top_k)(None, logits)
    assert_close(_filtered(logits, top_k, 1.0), expected, rtol=0, atol=0)


@pytest.mark.parametrize("top_p", [0.01, 0.3, 0.7, 0.95, 0.999])
def test_top_p_keeps_what_transformers_keeps(top_p: float) -> None:
    logits = random_logits(20, 30)
    expected = TopPLogitsWarper(top_p)(None, logits)
    assert_close(_filtered(logits, 0, top_p), expected, rtol=0, atol=0)


def test_top_p_by_hand_and_after_top_k() -> None:
    logits = torch.tensor([[0.1, 0.4, 0.3, 0.2]]).log()
    # in order 0.4, 0.3: 0.7 reaches 0.6
    assert _filtered(logits, 0, 0.6).isfinite().tolist() == [[False, True, True, False]]
    # of the two kept by top-k, 0.4 / 0.7 = 0.57 reaches 0.5
    assert _filtered(logits, 2, 0.5).isfinite().tolist() == [[False, True, False, False]]


def test_filtered_tokens_are_never_drawn_and_the_log_prob_is_unfiltered() -> None:
    logits = random_logits(1, 9).expand(500, 9)
    uniforms = torch.linspace(0, 1 - 2**-53, 500, dtype=torch.float64)
    tokens, log_probs = choose(logits, uniforms, top_k=4, top_p=0.9, temperature=0.7)
    kept = TopPLogitsWarper(0.9)(None, TopKLogitsWarper(4)(None, logits[:1] / 0.7)).isfinite()[0]
    assert set(tokens.tolist()) == set(kept.nonzero().flatten().tolist())
    unfiltered = torch.log_softmax(logits / 0.7, -1).gather(-1, tokens[:, None]).squeeze(-1)
    assert_close(log_probs, unfiltered)


def test_sampled_frequencies_match_the_probabilities() -> None:
    # chi-square with 7 degrees of freedom: 24.32 is passed by chance once in a thousand seeds
    count, temperature = 20000, 0.7
    logits = torch.tensor([[0.0, 1.0, -1.0, 2.0, 0.5, 1.5, -0.5, 0.2]])
    numbers = torch.from_numpy(uniform_numbers(7, 0, count))
    tokens, _ = choose(logits.expand(count, 8), numbers, temperature=temperature)
    expected = (logits[0] / temperature).double().softmax(-1) * count
    assert float(expected.min()) > 5
    observed = torch.bincount(tokens, minlength=8)
    assert float(((observed - expected) ** 2 / expected).sum()) < 24.32


@pytest.mark.parametrize("uniform", [0.0, 1 - 2**-53])
def test_the_ends_of_the_unit_interval_choose_an_allowed_token(uniform: float) -> None:
    logits = random_logits(50, 400)
    logits[:, [0, 399]] = -torch.inf
    tokens, log_probs = choose(logits, uniform)
    assert log_probs.isfinite().all()
    assert tokens.unique().tolist() == [1 if uniform == 0 else 398]


def test_log_prob_near_zero_keeps_its_digits_beside_large_logits() -> None:
    logits = torch.tensor([[200.0, 188.0]])  # -log(1 + exp(-12)) = -6.1442e-6
    _, log_probs = choose(logits, 0.0, do_sample=False)
    assert_close(log_probs, torch.tensor([-6.1442e-6]), rtol=2e-2, atol=0)


def test_a_row_chooses_the_same_whatever_is_in_the_batch() -> None:
    logits, numbers = random_logits(7, 50), torch.from_numpy(uniform_numbers(1, 2, 7))
    together, _ = choose(logits, numbers, top_p=0.9)
    alone = [int(choose(logits[i : i + 1], numbers[i], top_p=0.9)[0]) for i in range(7)]
    assert together.tolist() == alone


@pytest.mark.parametrize("do_sample", [True, False])
def test_eos_is_never_chosen_before_min_new_tokens(do_sample: bool) -> None:
    logits = torch.zeros(64, 6)
    logits[:, list(EOS)] = 5.0
    numbers = torch.linspace(0, 0.999, 64, dtype=torch.float64)
    keys = {"do_sample": do_sample, "min_new_tokens": 2}
    for generated in (0, 1):
        early, log_probs = choose(logits, numbers, generated, **keys)
        assert not set(early.tolist()) & set(EOS)
        # as always, the log-prob is that of the model and not of the filtered distribution
        assert_close(log_probs, torch.log_softmax(logits, -1)[:, 0])
    late, _ = choose(logits, numbers, 2, **keys)
    assert set(late.tolist()) & set(EOS)


def test_only_rows_that_are_too_short_are_held_back_from_eos() -> None:
    logits = torch.zeros(2, 6)
    logits[:, EOS[0]] = 9.0
    tokens, _ = choose_tokens(
        logits,
        torch.full((2,), 0.5, dtype=torch.float64),
        torch.tensor([1, 2]),
        settings(do_sample=False, min_new_tokens=2),
    )
    assert int(tokens[0]) not in EOS and int(tokens[1]) == EOS[0]


def test_random_numbers_belong_to_the_sample_alone() -> None:
    numbers = uniform_numbers(1234, 56, 100)
    assert numbers.dtype == np.float64 and (numbers >= 0).all() and (numbers < 1).all()
    assert (uniform_numbers(1234, 56, 30) == numbers[:30]).all()
    assert not np.isin(uniform_numbers(1234, 57, 100), numbers).any()
    assert not np.isin(uniform_numbers(1235, 56, 100), numbers).any()


def test_random_numbers_of_neighbouring_samples_are_uncorrelated() -> None:
    # 200 streams, first number of each: mean 1/2 within 5 standard errors of 0.29 / sqrt(200)
    first = np.array([uniform_numbers(1, sample, 1)[0] for sample in range(200)])
    assert abs(first.mean() - 0.5) < 5 * (1 / 12 / 200) ** 0.5
    assert abs(np.corrcoef(first[:-1], first[1:])[0, 1]) < 0.25
