"""Token choice against transformers' filters and against the probabilities themselves."""

from typing import Any

import hypothesis
import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from torch import Tensor
from torch.testing import assert_close
from transformers import TopKLogitsWarper, TopPLogitsWarper

from mindspeed_rlxf.ops.planning.memory import sampling_itemsize
from mindspeed_rlxf.rollout.rollout_engine import FinishReason
from mindspeed_rlxf.rollout.sampling import (
    BLOCK,
    SamplingSettings,
    StopStrings,
    _filter_top_k_and_p,
    choose_tokens,
    draw_tokens,
    fixed_order_sum,
    uniform_numbers,
)
from tests.traced import traced_peak
from tests.unit.data.byte_tokenizer import byte_tokenizer
from tests.unit.rollout.on_device import on_device
from tests.unit.rollout.test_native import settings as usual_settings

EOS = (3, 5)


def settings(**keys: Any) -> SamplingSettings:
    return usual_settings(**{"do_sample": True, "eos_token_ids": EOS, **keys})


def random_logits(rows: int, vocab: int, seed: int = 0) -> Tensor:
    return torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed)) * 2


def choose(
    logits: Tensor, uniforms: Tensor | float, generated: int = 0, **keys: Any
) -> tuple[Tensor, Tensor]:
    rows = logits.size(0)
    numbers = torch.as_tensor(uniforms, dtype=torch.float64).expand(rows)
    return choose_tokens(logits, numbers, torch.full((rows,), generated), settings(**keys))


def test_greedy_takes_the_largest_logit_and_ignores_temperature():
    logits = random_logits(6, 9)
    tokens, log_probs = choose(logits, 0.0, do_sample=False, temperature=0.1)
    assert tokens.tolist() == logits.argmax(-1).tolist()
    assert_close(log_probs, torch.log_softmax(logits, -1).amax(-1))


def test_numbers_and_counts_on_the_host_go_to_the_device_of_the_logits(monkeypatch):
    """As the engine `transformers` passes them; tensors without memory refuse other devices."""
    monkeypatch.setattr(Tensor, "cpu", lambda tensor: torch.zeros(tensor.shape))
    tokens, _ = choose(torch.empty(4, 9, device="meta"), 0.5, generated=1, min_new_tokens=3)
    assert tokens.device.type == "meta"


@pytest.mark.parametrize(
    ("top_k", "top_p"), [(1, 1), (3, 1), (99, 1), (0, 0.01), (0, 0.9), (9, 0.7)]
)
def test_top_k_and_top_p_keep_what_transformers_keeps(top_k, top_p):
    logits = random_logits(20, 30)
    expected = TopKLogitsWarper(top_k)(None, logits) if top_k else logits
    expected = TopPLogitsWarper(top_p)(None, expected)
    assert_close(_filter_top_k_and_p(logits, top_k, top_p), expected, rtol=0, atol=0)


def test_filtered_tokens_are_never_drawn_and_the_log_prob_is_unfiltered():
    logits = random_logits(1, 9).expand(500, 9)
    uniforms = torch.linspace(0, 1 - 2**-53, 500, dtype=torch.float64)
    tokens, log_probs = choose(logits, uniforms, top_k=4, top_p=0.9, temperature=0.7)
    kept = TopPLogitsWarper(0.9)(None, TopKLogitsWarper(4)(None, logits[:1] / 0.7)).isfinite()[0]
    assert set(tokens.tolist()) == set(kept.nonzero().flatten().tolist())
    unfiltered = torch.log_softmax(logits / 0.7, -1).gather(-1, tokens[:, None]).squeeze(-1)
    assert_close(log_probs, unfiltered)


def test_a_large_vocabulary_is_drawn_from_within_1e_6_of_its_cumulative_probability():
    # an fp32 cumulative sum is off by 2e-5 here
    vocab = 151_936
    logits = random_logits(1, vocab)
    uniforms = torch.from_numpy(uniform_numbers(3, 1, 64))
    tokens, _ = choose(logits.expand(64, vocab), uniforms)
    ends = logits[0].double().softmax(-1).cumsum(-1)
    assert (uniforms < ends[tokens] + 1e-6).all()
    assert (uniforms > ends[tokens - 1] - 1e-6).all()
    assert len(tokens.unique()) > 60


def test_deterministic_algorithms_scan_no_numbers_on_a_device(monkeypatch):
    """Torch refuses its cumsum on CUDA with deterministic algorithms."""
    logits, uniforms = torch.empty(6, BLOCK + 90, device="meta"), torch.empty(6, device="meta")
    generated, ends = uniforms.long(), torch.empty(2, device="meta", dtype=torch.int64)
    monkeypatch.setattr(Tensor, "cumsum", lambda *_, **__: pytest.fail("a scan on the device"))
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: True)
    keys = {"top_k": 40, "top_p": 0.9, "min_new_tokens": 2}
    tokens, log_probs = draw_tokens(logits, uniforms, generated, settings(**keys), ends)
    assert tokens.shape == log_probs.shape == (6,)


@pytest.mark.parametrize("doubled", [True, False])
@pytest.mark.parametrize("vocab", [40, 3 * BLOCK])
def test_a_scan_that_rises_at_weight_0_draws_no_forbidden_token(vocab, doubled, monkeypatch):
    """As the order of a parallel scan's sums differs from place to place."""
    logits = random_logits(400, vocab)
    logits[:, 1::2] = -torch.inf
    logits[:, -9:] = -torch.inf
    error = 1e-3 * torch.rand(vocab, generator=torch.Generator().manual_seed(1)).sort().values
    scan = Tensor.cumsum

    def inexact(numbers: Tensor, dim: int) -> Tensor:
        return scan(numbers, dim) * (1 + error[: numbers.size(dim)])

    def doubled_sum_of(numbers: Tensor, dim: int) -> Tensor:
        return fixed_order_sum(numbers)

    monkeypatch.setattr(Tensor, "cumsum", doubled_sum_of if doubled else inexact)
    uniforms = torch.cat((torch.linspace(0, 1, 300), torch.linspace(0.995, 1, 100)))
    tokens, _ = choose(logits, uniforms)
    assert logits.gather(-1, tokens[:, None]).isfinite().all()


@pytest.mark.parametrize("top_p", [1.0, 0.9])
@pytest.mark.parametrize("top_k", [0, 50])
@pytest.mark.parametrize("min_new_tokens", [0, 2])
def test_sampling_takes_the_memory_that_is_planned(top_p, top_k, min_new_tokens):
    rows, vocab = 4, 50_000
    logits, uniforms = random_logits(rows, vocab), torch.full((rows,), 0.5)
    keys = {"top_p": top_p, "top_k": top_k, "min_new_tokens": min_new_tokens}
    asked = settings(**keys, temperature=0.7)
    peak = logits.nbytes + traced_peak(
        lambda: draw_tokens(logits, uniforms, torch.zeros(rows), asked, torch.tensor(EOS))
    )
    planned = rows * vocab * sampling_itemsize(True, top_p < 1)
    assert 0.5 * planned < peak < 1.01 * planned


EXTREMES = (0.0, 2**-53, 1 - 2**-23, 1 - 2**-24, 1 - 2**-25, 1 - 2**-53)


@hypothesis.given(
    vocab=st.sampled_from([2, 9, BLOCK - 1, BLOCK, BLOCK + 1, 3 * BLOCK + 7]),
    seed=st.integers(0, 2**32 - 1),
    drawn=st.lists(st.floats(0, 1, exclude_max=True), max_size=4),
    keys=st.fixed_dictionaries(
        {
            "top_k": st.sampled_from([0, 1, 5]),
            "top_p": st.sampled_from([1.0, 0.7]),
            "temperature": st.sampled_from([1.0, 0.05]),
        }
    ),
)
def test_every_uniform_number_gives_an_allowed_token(vocab, seed, drawn, keys):
    """In fp32 a uniform number may become 1."""
    uniforms = torch.tensor([*EXTREMES, *drawn], dtype=torch.float64)
    logits = random_logits(len(uniforms), vocab, seed) * 4
    forbidden = torch.rand(logits.shape, generator=torch.Generator().manual_seed(seed)) < 0.4
    forbidden[:, -1] = vocab > 2
    logits = logits.masked_fill(forbidden & ~forbidden.all(-1, keepdim=True), -torch.inf)
    asked = settings(eos_token_ids=(), **keys)
    tokens, _ = choose_tokens(logits, uniforms, torch.zeros(len(logits)), asked)
    assert ((tokens >= 0) & (tokens < vocab)).all()
    kept = _filter_top_k_and_p(logits / keys["temperature"], keys["top_k"], keys["top_p"])
    assert kept.gather(-1, tokens[:, None]).isfinite().all()


def test_nothing_on_the_device_is_fp64():
    logits, uniforms = random_logits(6, BLOCK + 90), torch.from_numpy(uniform_numbers(1, 2, 6))
    keys = {"top_k": 40, "top_p": 0.9, "min_new_tokens": 2}
    found = choose_tokens(on_device(logits), uniforms, torch.arange(6), settings(**keys))
    assert_close(found, choose_tokens(logits, uniforms, torch.arange(6), settings(**keys)))


@pytest.mark.parametrize("vocab", [9, BLOCK, 2 * BLOCK - 24])
@pytest.mark.parametrize("wrong", [torch.nan, torch.inf, -torch.inf])
def test_logits_that_are_no_numbers_or_all_forbidden_are_an_error(wrong, vocab):
    logits = random_logits(2, vocab)
    logits[1, slice(None) if wrong == -torch.inf else 4] = wrong
    with pytest.raises(FloatingPointError, match="must be numbers"):
        choose(logits, 0.5, top_p=0.9 if wrong == -torch.inf else 1.0)


def test_log_prob_near_zero_keeps_its_digits_beside_large_logits():
    logits = torch.tensor([[200.0, 188.0]])  # -log(1 + exp(-12)) = -6.1442e-6
    _, log_probs = choose(logits, 0.0, do_sample=False)
    assert_close(log_probs, torch.tensor([-6.1442e-6]), rtol=2e-2, atol=0)


@pytest.mark.parametrize("do_sample", [True, False])
def test_eos_is_never_chosen_before_min_new_tokens(do_sample):
    logits = torch.zeros(96, 6)
    logits[:, list(EOS)] = 5.0
    numbers, generated = torch.linspace(0, 0.999, 96), torch.arange(96) % 3
    asked = settings(do_sample=do_sample, min_new_tokens=2)
    tokens, log_probs = choose_tokens(logits, numbers, generated, asked)
    early = generated < 2
    assert not set(tokens[early].tolist()) & set(EOS) and set(tokens[~early].tolist()) & set(EOS)
    # as always, the log-prob is that of the model and not of the filtered distribution
    assert_close(log_probs[early], torch.log_softmax(logits, -1)[early, 0])


def test_random_numbers_belong_to_the_sample_alone():
    numbers = uniform_numbers(1234, 56, 100)
    assert numbers.dtype == np.float64 and (numbers >= 0).all() and (numbers < 1).all()
    assert (uniform_numbers(1234, 56, 30) == numbers[:30]).all()
    assert not np.isin(uniform_numbers(1234, 57, 100), numbers).any()
    assert not np.isin(uniform_numbers(1235, 56, 100), numbers).any()


TOKENIZER = byte_tokenizer()
SPECIAL: int = TOKENIZER.convert_tokens_to_ids("<|im_end|>")


def ids(text: str) -> list[int]:
    found: list[int] = TOKENIZER(text, add_special_tokens=False)["input_ids"]
    return found


@pytest.mark.parametrize(
    ("strings", "text", "ended"),
    [
        (("</answer>",), "<answer>4</answer>", "<answer>4</answer>"),
        (("\n\n", "##"), "a\nb##c\n\n", "a\nb##"),
        (("größe",), "die größe x", "die größe"),
        (("aa",), "baaaa", "baa"),
        (("b",), "x" * 99 + "b", "x" * 99 + "b"),
        (("never",), "ever nevr", None),
    ],
)
def test_the_first_token_that_completes_a_string_ends_the_response(strings, text, ended):
    stop, tokens = StopStrings(strings, TOKENIZER), ids(text)
    ends = [n for n in range(1, len(tokens) + 1) if stop.is_completed_by(tokens[:n])]
    assert ends[:1] == ([] if ended is None else [len(ids(ended))])


def test_special_tokens_are_part_of_the_text_only_for_strings_that_spell_one():
    stop = StopStrings(("ab", ">"), TOKENIZER)
    assert stop.is_completed_by([*ids("a"), SPECIAL, *ids("b")])
    assert not stop.is_completed_by([*ids("b"), SPECIAL])
    for string in ("<|im_end|>", "b<|im_end|>", "<|im_end|>\n"):
        tokens = ids("ab<|im_end|>\n")
        stop = StopStrings(("never", string), TOKENIZER)
        ends = [n for n in range(1, len(tokens) + 1) if stop.is_completed_by(tokens[:n])]
        assert ends == [3 + string.endswith("\n")]


def test_only_a_new_occurrence_of_a_stop_string_ends_a_response():
    """As it does below `min_new_tokens`."""
    stop = StopStrings(("ab",), TOKENIZER)
    assert not stop.is_completed_by(ids("abc")) and stop.is_completed_by(ids("abcab"))


def test_the_finish_reason_is_that_of_an_end():
    stop = StopStrings(("ab",), TOKENIZER)
    for shortest, reason in ((0, FinishReason.STOP), (3, FinishReason.LENGTH)):
        asked = settings(min_new_tokens=shortest, eos_token_ids=(SPECIAL,), stop=stop)
        assert FinishReason.of(ids("ab"), asked) is reason
        assert FinishReason.of([SPECIAL], asked) is FinishReason.STOP
