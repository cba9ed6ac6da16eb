"""Reward and value positions ("slots") derived from response masks.

Slot t is the state before token t; its value is the critic's output at the preceding token. A
response with n tokens has slots 0 .. n - 1 and, with `score_position: after_eos`, an extra slot n
after a final EOS, which takes the score; its value is the critic's output at the EOS. The extra
slot exists only below the slot limit. Slots for untrained tokens have neither reward nor value.
"""

import torch
from torch import Tensor
from torch.nn.functional import pad


def readable_slots(trained_mask: Tensor, response_mask: Tensor) -> Tensor:
    """Return [batch, response + 1] bool: slots whose value either score position may read.

    True at trained tokens, and at slot n after n tokens, trained or not.
    """
    slots = pad(trained_mask, (0, 1))
    return slots.scatter(1, response_mask.sum(1, keepdim=True), True)


def value_mask(
    trained_mask: Tensor,
    response_mask: Tensor,
    has_eos: Tensor,
    position: str,
    slot_limit: int,
) -> Tensor:
    """Return [batch, response + 1] bool: slots with a reward and a trained value.

    These are the trained tokens, and with position AFTER_EOS also slot n if a trained EOS ends the
    response's n < `slot_limit` tokens.

    Args:
        trained_mask: [batch, response] bool, True for trained tokens.
        response_mask: [batch, response] bool, True for response tokens, at least one per row.
        has_eos: [batch] bool, the last token is an EOS.
        position: `algorithm.score_position`.
        slot_limit: Most slots per response (`max_new_tokens`, or TRL's batch width).
    """
    slots = pad(trained_mask, (0, 1))
    lengths = response_mask.sum(1)
    if position == "eos":
        return slots
    ends = trained_mask.gather(1, lengths[:, None] - 1).squeeze(1)
    extra = has_eos & ends & (lengths < slot_limit)
    return slots.scatter(1, lengths[:, None], extra[:, None])


def last_slots(mask: Tensor) -> Tensor:
    """Return [batch] int64: each row's last True index in `mask` [batch, slots]; 0 if none."""
    return (mask * torch.arange(1, mask.size(1) + 1, device=mask.device)).argmax(1)
