"""Reading response log-probs from hidden states; shared by actor and reference."""

from __future__ import annotations

import torch
from torch import Tensor

from mindspeed_rlxf.data.batch import LogProbs, LogProbsWithKl, Rollouts
from mindspeed_rlxf.engine.engine import MegatronEngine
from mindspeed_rlxf.engine.micro_batch import MicroBatch, scatter_rows
from mindspeed_rlxf.models.heads import full_kl, token_log_probs
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
    return LogProbs(_by_row(flat, batches, rollouts))


def log_probs_with_kl(
    engine: MegatronEngine, policy: MegatronEngine, rollouts: Rollouts, temperature: float
) -> LogProbsWithKl | None:
    """The reference's log-probs, and KL(policy || reference) over the vocabulary.

    Both engines have the same layout, so that a rank holds the same part of both vocabularies.
    """
    rows = range(rollouts.num_rows)

    def read_hidden(model: TransformerModel, batch: MicroBatch, hidden: Tensor) -> Tensor:
        places = batch.prediction_places(batch.response_lengths)
        return model.full_hidden(hidden, partial_gradient=False).index_select(0, places).cpu()

    # Row after row, whatever the micro-batches of the two.
    parts = policy.forward(policy.micro_batches(rollouts, rows), read_hidden)
    states = torch.cat(parts) if parts else torch.empty(0)
    starts = rollouts.response_lengths.cumsum(0) - rollouts.response_lengths

    def read(model: TransformerModel, batch: MicroBatch, hidden: Tensor) -> Tensor:
        first, count = int(starts[batch.rows[0]]), int(batch.response_lengths.sum())
        mine = states[first : first + count].to(hidden.device)
        kl = full_kl(
            mine,
            policy.chunks[-1].output_weight,
            read_hidden(model, batch, hidden).to(hidden.device),
            model.output_weight,
            model.architecture.vocab_size,
            model.tp_group,
            temperature,
        )
        return torch.stack((read_log_probs(model, batch, hidden, temperature)[0], kl))

    batches = engine.micro_batches(rollouts, rows)
    flat = engine.forward(batches, read)
    if not engine.groups.is_leader:
        return None
    log_probs, kl = ([part[i] for part in flat] for i in range(2))
    return LogProbsWithKl(_by_row(log_probs, batches, rollouts), _by_row(kl, batches, rollouts))


def _by_row(flat: list[Tensor], batches: list[MicroBatch], rollouts: Rollouts) -> Tensor:
    """[batch, response] fp32 from the values of each micro-batch."""
    counts = [batch.response_lengths for batch in batches]
    return scatter_rows(flat, counts, rollouts.response_ids.size(1)).to(torch.float32)
