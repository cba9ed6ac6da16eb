"""Operators of the simulated torch_npu against torch's own, and gradients against differences."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.npu_sim import load

attention, operators = load("attention"), load("operators")
HEADS, GROUPS, DIM = 4, 2, 6
COMPRESSED = torch.ones(2048, 2048, dtype=torch.bool).triu(1)


def draw(*size: int) -> Tensor:
    generator = torch.Generator().manual_seed(sum(size))
    return torch.randn(size, generator=generator, dtype=torch.float64)


def sequences(batch: int = 2, length: int = 5) -> list[Tensor]:
    heads = (HEADS, GROUPS, GROUPS)
    return [draw(batch, n, length + 0, DIM) * (i + 1) for i, n in enumerate(heads)]


def causal(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)


def to_layout(x: Tensor, layout: str) -> Tensor:
    order = {"BNSD": (0, 1, 2, 3), "BSND": (0, 2, 1, 3), "BSH": (0, 2, 1, 3), "SBH": (2, 0, 1, 3)}
    x = x.permute(order[layout])
    return x.flatten(2) if layout.endswith("H") else x


@pytest.mark.parametrize("layout", ["BNSD", "BSND", "BSH", "SBH"])
@pytest.mark.parametrize("mode", [0, 1, 2, 3])
def test_attention_of_rows_is_torchs_own(layout, mode):
    query, key, value = sequences()
    mask = COMPRESSED if mode in (2, 3) else COMPRESSED[:5, :5]
    found = attention.npu_fusion_attention(
        *(to_layout(x, layout) for x in (query, key, value)), HEADS, layout,
        atten_mask=mask, scale=DIM**-0.5, sparse_mode=mode, next_tockens=0,
    )[0]  # fmt: skip
    torch.testing.assert_close(found, to_layout(causal(query, key, value), layout))


def test_attention_without_a_mask_sees_everything():
    query, key, value = sequences()
    found = attention.npu_fusion_attention(
        query, key, value, HEADS, "BNSD", scale=DIM**-0.5, sparse_mode=2
    )[0]
    expected = F.scaled_dot_product_attention(query, key, value, enable_gqa=True)
    torch.testing.assert_close(found, expected)


def test_causal_modes_differ_in_the_corner_they_start_from():
    query, key, value = sequences()
    options = {"atten_mask": COMPRESSED, "scale": DIM**-0.5}
    last = query[:, :, 3:]  # two queries, five keys
    for mode, visible in ((2, [1, 2]), (3, [4, 5])):
        found = attention.npu_fusion_attention(
            last, key, value, HEADS, "BNSD", sparse_mode=mode, **options
        )[0]
        for i, count in enumerate(visible):
            seen = (x[:, :, :count] for x in (key, value))
            expected = F.scaled_dot_product_attention(last[:, :, i : i + 1], *seen, enable_gqa=True)
            torch.testing.assert_close(found[:, :, i : i + 1], expected)


def test_packed_attention_is_that_of_each_sequence_and_takes_no_leading_zero():
    lengths, ends = (3, 1, 5), [3, 4, 9]
    packed = [draw(9, n, DIM) for n in (HEADS, GROUPS, GROUPS)]
    found = attention.npu_fusion_attention(
        *packed, HEADS, "TND", atten_mask=COMPRESSED, scale=DIM**-0.5, sparse_mode=2,
        actual_seq_qlen=ends, actual_seq_kvlen=ends,
    )[0]  # fmt: skip
    for part, *own in zip(found.split(lengths), *(x.split(lengths) for x in packed), strict=True):
        rows = [x.transpose(0, 1)[None] for x in own]
        torch.testing.assert_close(part, causal(*rows)[0].transpose(0, 1))
    with pytest.raises(AssertionError, match="must not begin with 0"):
        attention.npu_fusion_attention(
            *packed, HEADS, "TND", actual_seq_qlen=[0, 9], actual_seq_kvlen=[0, 9]
        )


def test_gradient_of_attention():
    inputs = [x[..., :2].detach().requires_grad_() for x in sequences(1, 3)]

    def attend(*parts: Tensor) -> Tensor:
        return attention.npu_fusion_attention(
            *parts, HEADS, "BNSD", atten_mask=COMPRESSED, scale=0.4, sparse_mode=2
        )[0]

    assert torch.autograd.gradcheck(attend, inputs)
    grad = draw(1, HEADS, 3, 2)
    found = attention.npu_fusion_attention_grad(
        *inputs, grad, HEADS, "BNSD", atten_mask=COMPRESSED, scale_value=0.4, sparse_mode=2
    )
    expected = torch.autograd.grad(attend(*inputs), inputs, grad)
    torch.testing.assert_close(found[:3], expected)


def test_rms_norm_and_its_backward_are_torchs_own():
    x, gamma, grad = draw(3, 2, 8).requires_grad_(), draw(8).requires_grad_(), draw(3, 2, 8) * 2
    found, reverse_rms = operators.npu_rms_norm(x, gamma, epsilon=1e-5)
    expected = F.rms_norm(x, (8,), gamma, 1e-5)
    torch.testing.assert_close(found, expected)
    wanted = torch.autograd.grad(expected, (x, gamma), grad)
    torch.testing.assert_close(torch.autograd.grad(found, (x, gamma), grad), wanted)
    dx, dgamma = operators.npu_rms_norm_backward(
        grad, x.detach(), gamma.detach(), reverse_rms.detach()
    )
    torch.testing.assert_close(dx, wanted[0])
    torch.testing.assert_close(dgamma, wanted[1].float())


def test_swiglu_is_silu_of_the_first_half_times_the_second():
    x = draw(3, 8).requires_grad_()
    torch.testing.assert_close(operators.npu_swiglu(x), F.silu(x[:, :4]) * x[:, 4:])
    assert torch.autograd.gradcheck(operators.npu_swiglu, (x,))


@pytest.mark.parametrize("mode", ["half", "interleave"])
def test_rotary_turns_pairs_as_complex_numbers(mode):
    x, angle = draw(5, 1, 2, 6), draw(5, 1, 1, 3)
    turn = torch.polar(torch.ones_like(angle), angle)
    if mode == "half":
        turned, angles = torch.complex(x[..., :3], x[..., 3:]) * turn, torch.cat((angle, angle), -1)
        expected = torch.cat((turned.real, turned.imag), -1)
    else:
        angles = angle.repeat_interleave(2, -1)
        expected = torch.view_as_real(torch.view_as_complex(x.unflatten(-1, (3, 2))) * turn)
        expected = expected.flatten(-2)
    found = operators.npu_rotary_mul(x, angles.cos(), angles.sin(), mode)
    torch.testing.assert_close(found, expected)


def test_scaled_masked_softmax_gives_masked_scores_no_weight():
    x, mask = draw(1, 1, 4, 4), COMPRESSED[:4, :4]
    expected = (x * 0.5).masked_fill(mask, float("-inf")).softmax(-1)
    found = operators.npu_scaled_masked_softmax(x, mask[None, None], 0.5)
    torch.testing.assert_close(found, expected)
    found = operators.npu_scaled_masked_softmax(x, torch.zeros_like(mask)[None, None], 0.5, True)
    torch.testing.assert_close(found, expected)


def test_three_steps_of_adam_are_torchs_own():
    ours, theirs = draw(6), torch.nn.Parameter(draw(6))
    mean, squares = torch.zeros(6).double(), torch.zeros(6).double()
    optimizer = torch.optim.AdamW([theirs], lr=0.1, betas=(0.8, 0.9), eps=1e-3, weight_decay=0.2)
    for step in (1, 2, 3):
        grad = draw(6) * step
        theirs.grad = grad.clone()
        optimizer.step()
        operators.npu_apply_adam_w(
            0.8**step, 0.9**step, 0.1, 0.2, 0.8, 0.9, 1e-3, grad, None, False, False,
            out=(ours, mean, squares),
        )  # fmt: skip
        torch.testing.assert_close(ours, theirs.detach())


def test_grouped_matmul_multiplies_each_group_by_its_weight():
    x, weight, grad = draw(5, 3), draw(2, 3, 4), draw(5, 4)
    expected = torch.cat((x[:2] @ weight[0], x[2:] @ weight[1]))
    for kind, groups in ((0, [2, 5]), (1, [2, 3])):
        (found,) = operators.npu_grouped_matmul(
            [x], [weight], group_list=groups, group_type=0, group_list_type=kind
        )
        torch.testing.assert_close(found, expected)
    (found,) = operators.npu_grouped_matmul([x.T], [grad], group_list=[2, 5], group_type=2)
    torch.testing.assert_close(found, torch.stack((x[:2].T @ grad[:2], x[2:].T @ grad[2:])))


def test_tokens_come_back_weighted_from_their_experts():
    tokens, probs = draw(3, 4), draw(3, 2)
    experts = torch.tensor([[1, 0], [0, 2], [2, 1]])
    permuted, places = operators.npu_moe_token_permute(tokens, experts)
    # expert 0: tokens 0, 1; expert 1: tokens 0, 2; expert 2: tokens 1, 2
    torch.testing.assert_close(permuted, tokens[[0, 1, 0, 2, 1, 2]])
    back = operators.npu_moe_token_unpermute(permuted, places, probs)
    torch.testing.assert_close(back, tokens * probs.sum(1, keepdim=True))
