"""Slots of a response: the places of rewards and values, derived from its masks.

Slot t of a response is the state before its token t; its value is the model's output one token
earlier. A response of n tokens has the slots 0 .. n - 1 and, with `score_position: after_eos`, one
more slot n after an EOS, which takes the score; its value is the critic's at the EOS token. The
extra slot exists only below the slot limit, so that it never reaches beyond what could be
generated. Slots of tokens that are not learnt from have neither reward nor value.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from mindspeed_rlxf.config.enums import ScorePosition


def readable_slots(trained_mask: Tensor, response_mask: Tensor) -> Tensor:
    """Return [batch, response + 1] bool: slots whose value may be needed at any score position.

    Those of trained tokens, and the one behind the last token.
    """
    slots = pad(trained_mask, (0, 1))
    return slots.scatter(1, response_mask.sum(1, keepdim=True), True)


def value_mask(
    trained_mask: Tensor,
    response_mask: Tensor,
    has_eos: Tensor,
    position: ScorePosition,
    slot_limit: int,
) -> Tensor:
    """Return [batch, response + 1] bool: slots with a value to learn.

    trained_mask, response_mask: [batch, response] bool, True = token that is learnt from / is there
    has_eos: [batch] bool, the last token is an EOS
    slot_limit: slots that a response can have at most (`max_new_tokens`, or TRL's batch width)
    """
    slots, lengths = pad(trained_mask, (0, 1)), response_mask.sum(1)
    if position is ScorePosition.EOS:
        return slots
    ends = trained_mask.gather(1, lengths[:, None] - 1).squeeze(1)
    extra = has_eos & ends & (lengths < slot_limit)
    return slots.scatter(1, lengths[:, None], extra[:, None])


def last_slots(mask: Tensor) -> Tensor:
    """[batch] int64: the last slot of each row of [batch, slots] bool."""
    return (mask * torch.arange(1, mask.size(1) + 1, device=mask.device)).argmax(1)
