"""Read log-probs, values and scores from a micro-batch's hidden states, as `engine.schedule` does.

All ranks of a context-parallel group get all results. `engine` is the `FsdpEngine`, `hidden` has
this rank's tokens, [tokens, hidden].
"""

from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from mindspeed_rlxf.engine.micro_batch import MicroBatch
from mindspeed_rlxf.engine.train_engine import TokenLogProbs
from mindspeed_rlxf.models.context_parallel import compute_at
from mindspeed_rlxf.models.heads import full_kl, token_log_probs

ONE_RANK: Any = SimpleNamespace(size=lambda: 1, rank=lambda: 0)  # no tensor-parallel group


def read_log_probs(
    engine: Any, batch: MicroBatch, hidden: Tensor, temperature: float
) -> TokenLogProbs:
    """Compute the trained tokens' log-probs and entropies, [tokens] each."""
    weight = engine.model.lm_head.weight
    settings = len(weight), ONE_RANK, temperature, engine.linear

    def compute(states: Tensor, own: Tensor) -> Tensor:
        labels = batch.trained_ids[own.to(batch.trained_ids.device)]
        return torch.stack(token_log_probs(states, weight, labels, *settings), dim=-1)

    found = compute_at(hidden, batch.prediction_places(batch.trained_mask), batch.cp, compute)
    return TokenLogProbs(found[:, 0], found[:, 1])


def read_values(engine: Any, batch: MicroBatch, hidden: Tensor, slots: Tensor) -> Tensor:
    """Compute the values for the slots marked in [rows, slots] bool, row after row, fp32."""
    return _score(engine, batch, hidden, batch.prediction_places(slots))


def read_scores(engine: Any, batch: MicroBatch, hidden: Tensor) -> Tensor:
    """Compute the score at each row's last token, [rows] fp32."""
    return _score(engine, batch, hidden, batch.last_places())


def _score(engine: Any, batch: MicroBatch, hidden: Tensor, places: Tensor) -> Tensor:
    weight = engine.model.lm_head.weight.float()
    return compute_at(hidden, places, batch.cp, lambda s, _: F.linear(s.float(), weight)[:, 0])


def read_states(engine: Any, batch: MicroBatch, hidden: Tensor) -> Tensor:
    """Return the hidden states that predict the trained tokens, [tokens, hidden], on the host.

    The policy's wait there for the other model's, those of a whole batch.
    """
    places = batch.prediction_places(batch.trained_mask)
    return compute_at(hidden, places, batch.cp, lambda states, _: states).cpu()


def read_log_probs_and_kl(
    engine: Any, batch: MicroBatch, hidden: Tensor, output: Tensor, states: Tensor,
    temperature: float,
) -> Tensor:  # fmt: skip
    """Compute [2, tokens]: the trained tokens' log-probs, and KL(policy || model) at each.

    The policy has the output layer `output`, and `states`, [tokens, hidden], in this micro-batch.
    """
    weight = engine.model.lm_head.weight
    settings = len(weight), ONE_RANK, temperature, engine.linear

    def compute(own_states: Tensor, numbers: Tensor) -> Tensor:
        theirs = states[numbers].to(hidden.device)
        return full_kl(theirs, output, own_states, weight, *settings)

    places = batch.prediction_places(batch.trained_mask)
    kl = compute_at(hidden, places, batch.cp, compute)
    return torch.stack((read_log_probs(engine, batch, hidden, temperature).log_probs, kl))
