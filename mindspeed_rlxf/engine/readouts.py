"""Compute results from a micro-batch's hidden states, on the last pipeline stage.

Axes: tokens = the micro-batch's trained tokens, row after row; slots = positions with a value.
"""

from collections.abc import Callable, Sequence
from typing import TypeAlias

import torch
from torch import Tensor

from mindspeed_rlxf.algorithms.losses import LossOutput
from mindspeed_rlxf.engine.micro_batch import MicroBatch
from mindspeed_rlxf.engine.train_engine import PolicyStep, TokenLogProbs, ValueStep
from mindspeed_rlxf.models.heads import full_kl, token_log_probs
from mindspeed_rlxf.models.transformer import TransformerModel

Read: TypeAlias = Callable[[TransformerModel, MicroBatch, Tensor], Tensor]
"""(last chunk of the model, micro-batch, its hidden states) -> result of the micro-batch."""


def loss_reader(
    step: PolicyStep | ValueStep,
) -> Callable[[TransformerModel, MicroBatch, Tensor], LossOutput]:
    """Return a function that computes a step's loss from a micro-batch's hidden states.

    A PolicyStep gets the trained tokens' log-probs, a ValueStep its slots' values.
    """

    def read(model: TransformerModel, batch: MicroBatch, hidden: Tensor) -> LossOutput:
        if isinstance(step, PolicyStep):
            return step.loss(batch.rows, read_log_probs(model, batch, hidden, step.temperature))
        return step.loss(batch.rows, read_values(model, batch, hidden, step.slots[batch.rows]))

    return read


def read_log_probs(
    model: TransformerModel, batch: MicroBatch, hidden: Tensor, temperature: float
) -> TokenLogProbs:
    """Compute the trained tokens' log-probs and entropies, [tokens] each.

    A collective over the tensor-parallel ranks.
    """
    places = batch.prediction_places(batch.trained_mask)
    return TokenLogProbs(
        *token_log_probs(
            model.full_hidden(hidden, partial_gradient=True).index_select(0, places),
            model.output_weight,
            batch.trained_ids,
            model.architecture.vocab_size,
            model.tp_group,
            temperature,
        )
    )


def read_values(
    model: TransformerModel, batch: MicroBatch, hidden: Tensor, slots: Tensor
) -> Tensor:
    """Compute the values for the slots marked in [rows, slots] bool, row after row, fp32.

    A slot's value is the score head's output one token before it (`prediction_places`). With
    sequence parallelism a collective over the tensor-parallel ranks.
    """
    full = model.full_hidden(hidden, partial_gradient=False)
    return model.score(full.index_select(0, batch.prediction_places(slots)))


def read_scores(model: TransformerModel, batch: MicroBatch, hidden: Tensor) -> Tensor:
    """Compute the score at each row's last token, [rows] fp32.

    With sequence parallelism a collective over the tensor-parallel ranks.
    """
    full = model.full_hidden(hidden, partial_gradient=False)
    return model.score(full.index_select(0, batch.last_places()))


def read_states(model: TransformerModel, batch: MicroBatch, hidden: Tensor) -> Tensor:
    """Return the hidden states that predict the trained tokens, [tokens, hidden], on the host.

    With sequence parallelism a collective.
    """
    places = batch.prediction_places(batch.trained_mask)
    return model.full_hidden(hidden, partial_gradient=False).index_select(0, places).cpu()


def read_log_probs_and_kl(
    model: TransformerModel,
    batch: MicroBatch,
    hidden: Tensor,
    policy: TransformerModel,
    states: Tensor,
    temperature: float,
) -> Tensor:
    """Compute [2, tokens]: the trained tokens' log-probs, and KL(policy || model) at each.

    `policy` is the policy's last model chunk; `states`, [tokens, hidden], are its `read_states` for
    this micro-batch.
    """
    kl = full_kl(
        states.to(hidden.device),
        policy.output_weight,
        read_states(model, batch, hidden).to(hidden.device),
        model.output_weight,
        model.architecture.vocab_size,
        model.tp_group,
        temperature,
    )
    return torch.stack((read_log_probs(model, batch, hidden, temperature).log_probs, kl))


def scatter_rows(flat: Sequence[Tensor], mask: Tensor) -> Tensor:
    """Return [rows, width] fp32 on the CPU: the flat values at True mask elements, 0 elsewhere.

    Args:
        flat: Values per micro-batch, row after row; the micro-batches have consecutive rows.
        mask: [all rows, width] bool.
    """
    out = torch.zeros(mask.shape, dtype=torch.float32)
    out[mask] = torch.cat([part.cpu() for part in flat]).float()
    return out
