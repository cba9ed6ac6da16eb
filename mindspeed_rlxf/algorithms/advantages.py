"""Token rewards, generalised advantage estimation and rewards to go.

Axes: slots = positions of rewards and values, one more than tokens of a response (`slots`).
"""

import torch
from torch import Tensor
from torch.nn.functional import pad

from mindspeed_rlxf.algorithms.slots import last_slots

BLOCK = 128
"""Positions that one loop adds up; longer rows are cut into blocks of this length."""


def discounted_sums(inputs: Tensor, factors: Tensor, stride: int = 1) -> Tensor:
    """Return x [rows, width] with x_t = inputs_t + factor^stride * x_(t+1); x_width = 0.

    inputs:  [rows, width]
    factors: [rows], one for each row, 0 to 1, of the same dtype
    stride:  exponent of the factors; only the recursion sets it
    Rows of more than BLOCK items are summed in blocks, all at once; then the first elements of the
    blocks are summed by recursion, and each block adds the discounted sum of the blocks after it.

    Terms are multiplied by powers of at most 1, and nothing is divided. With unit roundoff u and n
    levels of recursion, the error is at most n (3 BLOCK + 4) u times the same sum over |inputs|:
    1.3e-13 in fp64 and 7e-5 in fp32 for widths up to BLOCK^3.
    """
    width = inputs.size(1)
    if width <= BLOCK:
        return _one_by_one(inputs, factors**stride)
    blocks = pad(inputs, (0, -width % BLOCK)).view(len(inputs), -1, BLOCK)
    count = blocks.size(1)
    each = (factors**stride).repeat_interleave(count)
    within = _one_by_one(blocks.reshape(-1, BLOCK), each).contiguous().view(blocks.shape)
    firsts = discounted_sums(within[:, :, 0], factors, stride * BLOCK)
    after = pad(firsts[:, 1:], (0, 1))
    distance = torch.arange(BLOCK, 0, -1, dtype=inputs.dtype, device=inputs.device)
    powers = factors[:, None] ** (stride * distance)
    whole = torch.addcmul(within, powers[:, None, :], after[:, :, None])
    return whole.reshape(len(inputs), -1)[:, :width]


def _one_by_one(inputs: Tensor, factors: Tensor) -> Tensor:
    """Return `discounted_sums(inputs, factors)` by a loop from the last position to the first.

    inputs: [rows, width], not changed; factors: [rows]
    The result is not contiguous: the same position of all rows is next to each other.
    """
    # A copy in which the same position of all rows is contiguous in memory.
    columns = inputs.t().clone(memory_format=torch.contiguous_format)
    for t in reversed(range(len(columns) - 1)):
        columns[t] += factors * columns[t + 1]
    return columns.t()


def token_rewards(kl: Tensor, scores: Tensor, mask: Tensor, kl_coef: float) -> Tensor:
    """Return [batch, slots] rewards: -kl_coef * kl, plus the score on each row's last True slot.

    kl:     [batch, slots] fp32, 0 where not trained
    scores: [batch]
    mask:   [batch, slots] bool, `slots.value_mask`; a row without True has its score on slot 0
    """
    rewards = -kl_coef * kl
    return rewards.scatter_add(1, last_slots(mask)[:, None], scores[:, None])


def estimate_gae(
    rewards: Tensor, values: Tensor, mask: Tensor, gamma: float, lam: float | Tensor
) -> tuple[Tensor, Tensor]:
    """Return (advantages, returns) by GAE (arXiv:1506.02438, section 3), each [batch, slots].

    Both are 0 where `mask` is False. Advantages are not whitened; returns are advantages + values.
    rewards: [batch, slots] fp32, KL penalty already added
    values:  [batch, slots] fp32
    mask:    [batch, slots] bool, True = slot that is trained. Other slots are skipped, as if
             they were cut out of the row: the slot after a True slot is the next True slot
    lam:     one for all responses, or [batch] fp32
    """
    counts = mask.sum(1)
    packed = torch.arange(mask.size(1), device=mask.device) < counts[:, None]
    if bool((packed == mask).all()):
        advantages = _sum_td_errors(rewards * mask, values * mask, counts, gamma, lam)
    else:  # move the True slots to the front, so that what is between them changes no bit
        slots, steps = mask.flatten().nonzero()[:, 0], packed.flatten().nonzero()[:, 0]
        reward, value = (_move(column, slots, steps) for column in (rewards, values))
        advantages = _move(_sum_td_errors(reward, value, counts, gamma, lam), steps, slots)
    return advantages, (advantages + values) * mask


def _move(values: Tensor, sources: Tensor, targets: Tensor) -> Tensor:
    """Return a tensor shaped as `values`: 0, but values[sources[i]] at targets[i] for each i.

    sources, targets: indices of the flattened tensor
    """
    flat = torch.zeros_like(values).flatten()
    moved = values.flatten().index_select(0, sources)
    return flat.index_copy_(0, targets, moved).view(values.shape)


def _sum_td_errors(
    rewards: Tensor, values: Tensor, counts: Tensor, gamma: float, lam: float | Tensor
) -> Tensor:
    """Return [batch, steps]: for each step the discounted sum of its and all later TD errors.

    The discount per step is gamma * lam.
    rewards, values: [batch, steps], 0 after the first counts[row] steps of a row
    counts:          [batch] int64
    lam:             one for all rows, or [batch]
    Rows of more than BLOCK steps are summed in fp64 if the tensors are on the CPU; on other
    devices, which may have no fp64, all rows are summed in the dtype of `values`. The result has
    that dtype.
    """
    sums = torch.zeros_like(values)
    long = counts > BLOCK
    for rows, width, wide in ((~long, BLOCK, False), (long, values.size(1), True)):
        if not bool(rows.any()):
            continue
        dtype = torch.float64 if wide and values.device.type == "cpu" else values.dtype
        reward, value = (column[rows, :width].to(dtype) for column in (rewards, values))
        errors = reward + gamma * pad(value[:, 1:], (0, 1)) - value
        factors = gamma * (lam[rows].to(dtype) if isinstance(lam, Tensor) else lam)
        factors = torch.as_tensor(factors, dtype=dtype, device=values.device).expand(len(errors))
        sums[rows, :width] = discounted_sums(errors, factors).to(values.dtype)
    return sums


def length_adaptive_lambda(lengths: Tensor, alpha: float) -> Tensor:
    """Return lambda = 1 - 1 / (alpha * l) of responses of l tokens (VAPO, arXiv:2504.05118, 4.2).

    The longer a response, the closer to 1. Departure: 0 where alpha * l < 1, for which the formula
    gives a negative number.
    lengths: [batch] int64, at least 1 -> [batch] fp32
    """
    return (1.0 - 1.0 / (alpha * lengths.float())).clamp(min=0.0)


def rewards_to_go(rewards: Tensor, mask: Tensor, gamma: float) -> Tensor:
    """Return [batch, slots]: the sum of this slot's reward and the discounted rewards after it.

    0 where `mask` is False. This is the return of REINFORCE. A False slot is skipped as if cut out:
    its reward does not count and it does not discount.
    rewards: [batch, slots] fp32
    mask:    [batch, slots] bool, True = slot that is trained
    gamma:   discount per True slot
    """
    _, returns = estimate_gae(rewards, torch.zeros_like(rewards), mask, gamma, 1.0)
    return returns


def shape_scores(scores: Tensor, scale: float, clip: float | None) -> Tensor:
    """Return scale * score, clamped to +-clip; clip None = not clamped. [batch] -> [batch].

    NaN where a score is NaN or inf, because clamping would hide inf.
    """
    scaled = scores.where(scores.isfinite(), torch.nan) * scale
    return scaled if clip is None else scaled.clamp(-clip, clip)


def overlong_penalty(
    response_lengths: Tensor, max_new_tokens: int, buffer_len: int, factor: float
) -> Tensor:
    """Return what to subtract from the scores of long responses (DAPO, arXiv:2503.14476, 3.4).

    It rises linearly from 0 at max_new_tokens - buffer_len to `factor` at max_new_tokens, and is
    constant outside these lengths; all 0 with buffer_len 0.
    response_lengths: [batch] int64 -> [batch] fp32, >= 0
    """
    if not buffer_len:
        return response_lengths.float() * 0.0
    beyond = (response_lengths - (max_new_tokens - buffer_len)).float()
    return (beyond / buffer_len).clamp(0.0, 1.0) * factor
