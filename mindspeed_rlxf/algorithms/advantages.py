"""Token rewards, generalised advantage estimation and rewards to go.

Shapes use `slots`, the reward and value positions: one more than the response tokens (`slots`).
"""

import torch
from torch import Tensor
from torch.nn.functional import pad

from mindspeed_rlxf.algorithms.slots import last_slots

BLOCK = 128
"""Positions that one loop adds up; longer rows are cut into blocks of this length."""


def discounted_sums(inputs: Tensor, factors: Tensor, stride: int = 1) -> Tensor:
    """Return x [rows, width] with x_t = inputs_t + factor^stride * x_(t+1) and x_width = 0.

    `factors` [rows] are in 0..1 and share the dtype; only the recursion sets `stride`. Rows longer
    than BLOCK are summed in blocks, all at once; a recursion sums the first elements, and each
    block adds the discounted sum after it. Terms are multiplied by powers up to 1 and never
    divided: with unit roundoff u and n recursion levels, the error stays within n (3 BLOCK + 4) u
    times the same sum over |inputs|, which is 1.3e-13 in fp64 and 7e-5 in fp32 for widths up to
    BLOCK^3.
    """
    width = inputs.size(1)
    if width <= BLOCK:
        return _one_by_one(inputs, factors**stride)
    blocks = pad(inputs, (0, -width % BLOCK)).view(len(inputs), -1, BLOCK)
    block_factors = (factors**stride).repeat_interleave(blocks.size(1))
    within = _one_by_one(blocks.reshape(-1, BLOCK), block_factors).contiguous().view(blocks.shape)
    firsts = discounted_sums(within[:, :, 0], factors, stride * BLOCK)
    after = pad(firsts[:, 1:], (0, 1))  # [rows, blocks]: the sum that follows each block
    distance = torch.arange(BLOCK, 0, -1, dtype=inputs.dtype, device=inputs.device)
    powers = factors[:, None] ** (stride * distance)
    sums = torch.addcmul(within, powers[:, None, :], after[:, :, None])
    return sums.reshape(len(inputs), -1)[:, :width]


def _one_by_one(inputs: Tensor, factors: Tensor) -> Tensor:
    # A copy in which the same position of all rows is contiguous in memory.
    columns = inputs.t().clone(memory_format=torch.contiguous_format)
    for t in reversed(range(len(columns) - 1)):
        columns[t] += factors * columns[t + 1]
    return columns.t()


def token_rewards(kl: Tensor, scores: Tensor, mask: Tensor, kl_coef: float) -> Tensor:
    """Return [batch, slots] rewards: -kl_coef * kl, plus the score on each row's last True slot.

    `kl` is [batch, slots] fp32, 0 unless trained, and `scores` [batch]. `mask` is
    `slots.value_mask`; a row without True gets its score on slot 0.
    """
    rewards = -kl_coef * kl
    return rewards.scatter_add(1, last_slots(mask)[:, None], scores[:, None])


def estimate_gae(
    rewards: Tensor, values: Tensor, mask: Tensor, gamma: float, lam: float | Tensor
) -> tuple[Tensor, Tensor]:
    """Estimate GAE advantages and returns (arXiv:1506.02438, section 3).

    Args:
        rewards: [batch, slots] fp32, KL penalty included.
        values: [batch, slots] fp32.
        mask: [batch, slots] bool, True for trained slots. Other slots are skipped as if cut out:
            the successor to a True slot is the next True slot.
        gamma: Discount.
        lam: GAE lambda, a single number or [batch] fp32.

    Returns:
        Advantages (not whitened) and returns (advantages + values), both [batch, slots], 0 where
        masked.
    """
    counts = mask.sum(1)
    packed = torch.arange(mask.size(1), device=mask.device) < counts[:, None]
    if bool((packed == mask).all()):
        advantages = _sum_td_errors(rewards * mask, values * mask, counts, gamma, lam)
    else:  # move the True slots to the front, so that what is between them changes no bit
        slots = mask.flatten().nonzero()[:, 0]
        steps = packed.flatten().nonzero()[:, 0]
        packed_rewards = _move(rewards, slots, steps)
        packed_values = _move(values, slots, steps)
        packed_sums = _sum_td_errors(packed_rewards, packed_values, counts, gamma, lam)
        advantages = _move(packed_sums, steps, slots)
    return advantages, (advantages + values) * mask


def _move(values: Tensor, sources: Tensor, targets: Tensor) -> Tensor:
    flat = torch.zeros_like(values).flatten()
    moved = values.flatten().index_select(0, sources)
    return flat.index_copy_(0, targets, moved).view(values.shape)


def _sum_td_errors(
    rewards: Tensor, values: Tensor, counts: Tensor, gamma: float, lam: float | Tensor
) -> Tensor:
    """Return [batch, steps]: TD errors summed from each step on, discounted by gamma * lam.

    `rewards` and `values` are 0 after the first counts[row] steps. On CPU, rows longer than BLOCK
    are summed in fp64; other devices, which may lack fp64, use the dtype `values` has.
    """
    sums = torch.zeros_like(values)
    long_rows = counts > BLOCK
    long_dtype = torch.float64 if values.device.type == "cpu" else values.dtype
    for rows, width, dtype in (
        (~long_rows, BLOCK, values.dtype),
        (long_rows, values.size(1), long_dtype),
    ):
        if not bool(rows.any()):
            continue
        reward = rewards[rows, :width].to(dtype)
        value = values[rows, :width].to(dtype)
        errors = reward + gamma * pad(value[:, 1:], (0, 1)) - value
        factors = gamma * (lam[rows].to(dtype) if isinstance(lam, Tensor) else lam)
        factors = torch.as_tensor(factors, dtype=dtype, device=values.device).expand(len(errors))
        sums[rows, :width] = discounted_sums(errors, factors).to(values.dtype)
    return sums


def length_adaptive_lambda(lengths: Tensor, alpha: float) -> Tensor:
    """Return [batch] lambda = 1 - 1 / (alpha * length) (VAPO, arXiv:2504.05118, 4.2).

    Longer responses get a lambda closer to 1. Departure from the paper: 0 if alpha * length < 1,
    because the formula turns negative there.
    """
    return (1.0 - 1.0 / (alpha * lengths.float())).clamp(min=0.0)


def rewards_to_go(rewards: Tensor, mask: Tensor, gamma: float) -> Tensor:
    """Return [batch, slots] REINFORCE returns: a slot's reward plus the discounted later ones.

    `mask` is True for trained slots; other slots get 0, and neither count nor discount.
    """
    _, returns = estimate_gae(rewards, torch.zeros_like(rewards), mask, gamma, 1.0)
    return returns


def shape_scores(scores: Tensor, scale: float, clip: float | None) -> Tensor:
    """Return scale * score, clamped to +-clip unless that is None: [batch] -> [batch].

    NaN and inf scores become NaN, because clamping would hide inf.
    """
    scaled = scores.where(scores.isfinite(), torch.nan) * scale
    return scaled if clip is None else scaled.clamp(-clip, clip)


def overlong_penalty(
    response_lengths: Tensor, max_new_tokens: int, buffer_len: int, factor: float
) -> Tensor:
    """Return the penalty [batch] fp32 for long responses (DAPO, arXiv:2503.14476, 3.4).

    It is 0 up to max_new_tokens - buffer_len tokens, then rises linearly to `factor` at
    max_new_tokens; always 0 if buffer_len is 0.
    """
    if not buffer_len:
        return response_lengths.float() * 0.0
    beyond = (response_lengths - (max_new_tokens - buffer_len)).float()
    return (beyond / buffer_len).clamp(0.0, 1.0) * factor
