"""Slots of a response: the positions of rewards and values, derived from its masks.

Slot t of a response is the state before its token t; its value is the critic's output at the token
before. A response of n tokens has the slots 0 .. n - 1 and, with `score_position: after_eos`, an
extra slot n after a final EOS, which takes the score; its value is the critic's output at the EOS.
The extra slot exists only below the slot limit. Slots of tokens that are not trained have neither
reward nor value.
"""

import torch
from torch import Tensor
from torch.nn.functional import pad


def readable_slots(trained_mask: Tensor, response_mask: Tensor) -> Tensor:
    """Return [batch, response + 1] bool: slots whose value may be read at either score position.

    True at the slots of trained tokens, and at slot n of each response of n tokens, trained or not.
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
    """Return [batch, response + 1] bool: slots with a reward, and a value that the critic learns.

    The slots of trained tokens. With position AFTER_EOS also slot n of a response of n <
    `slot_limit` tokens that ends with a trained EOS.
    trained_mask:  [batch, response] bool, True = token that is trained
    response_mask: [batch, response] bool, True = token of the response, at least one per row
    has_eos:       [batch] bool, the last token is an EOS
    slot_limit:    most slots of a response (`max_new_tokens`, or TRL's batch width)
    """
    slots, lengths = pad(trained_mask, (0, 1)), response_mask.sum(1)
    if position == "eos":
        return slots
    ends = trained_mask.gather(1, lengths[:, None] - 1).squeeze(1)
    extra = has_eos & ends & (lengths < slot_limit)
    return slots.scatter(1, lengths[:, None], extra[:, None])


def last_slots(mask: Tensor) -> Tensor:
    """Return [batch] int64: index of the last True of each row of `mask`; 0 where there is none.

    mask: [batch, slots] bool
    """
    return (mask * torch.arange(1, mask.size(1) + 1, device=mask.device)).argmax(1)
