"""Reading response log-probs from hidden states; shared by actor and reference."""

from __future__ import annotations

import torch
from torch import Tensor

from mindspeed_rlxf.data.batch import LogProbs, Rollouts
from mindspeed_rlxf.engine.engine import MegatronEngine
from mindspeed_rlxf.engine.micro_batch import MicroBatch, scatter_rows
from mindspeed_rlxf.models.heads import token_log_probs
from mindspeed_rlxf.models.transformer import TransformerModel


def read_log_probs(
    model: TransformerModel, batch: MicroBatch, hidden: Tensor, temperature: float
) -> tuple[Tensor, Tensor]:
    """Log-probs and entropies of all response tokens of a micro-batch, row after row.

    Returns two [response tokens] fp32 tensors.
    """
    places = batch.prediction_places(batch.response_lengths)
    return token_log_probs(
        model.full_hidden(hidden, partial_gradient=True).index_select(0, places),
        model.output_weight,
        batch.response_ids,
        model.architecture.vocab_size,
        model.tp_group,
        temperature,
    )


def response_log_probs(
    engine: MegatronEngine, rollouts: Rollouts, temperature: float
) -> LogProbs | None:
    """A forward pass over the rank's samples; None on ranks without the last stage."""
    batches = engine.micro_batches(rollouts, range(rollouts.num_rows))

    def read(model: TransformerModel, batch: MicroBatch, hidden: Tensor) -> Tensor:
        return read_log_probs(model, batch, hidden, temperature)[0]

    flat = engine.forward(batches, read)
    if not engine.groups.is_leader:
        return None
    counts = [batch.response_lengths for batch in batches]
    return LogProbs(scatter_rows(flat, counts, rollouts.response_ids.size(1)).to(torch.float32))
