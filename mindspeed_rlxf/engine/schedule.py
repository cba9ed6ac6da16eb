"""Run Megatron's schedule over micro-batches, and compute results from their hidden states.

Results exist on the last pipeline stage only. Axes: tokens = the micro-batch's trained tokens, row
after row; slots = positions with a value.
"""

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import torch
from megatron.core.pipeline_parallel import get_forward_backward_func
from torch import Tensor

from mindspeed_rlxf.algorithms.losses import LossOutput
from mindspeed_rlxf.engine.build import await_gathers
from mindspeed_rlxf.engine.micro_batch import MicroBatch
from mindspeed_rlxf.engine.train_engine import TokenLogProbs
from mindspeed_rlxf.models.context_parallel import compute_at
from mindspeed_rlxf.models.experts import set_balance_loss_weight
from mindspeed_rlxf.models.heads import full_kl, token_log_probs
from mindspeed_rlxf.models.transformer import TransformerModel


def run_schedule(
    models: Sequence[Any],
    last: TransformerModel,
    micro_batches: Sequence[MicroBatch],
    then: Callable[[TransformerModel, MicroBatch, Tensor], Any],
    forward_only: bool = False,
) -> list[Any]:
    """Run forward passes and, unless `forward_only`, backward passes for all micro-batches.

    The models are this rank's chunks, wrapped for data parallelism if trained; `last` is the last
    one, not wrapped. `then` computes a LossOutput from the hidden states, or with `forward_only`
    any tensor. Returns its outputs on the last pipeline stage, else [].
    """

    def forward_step(batches, model):  # type: ignore[no-untyped-def]
        batch = next(batches)
        hidden = model(batch.own_token_ids, batch.own_positions, batch.attend)
        await_gathers(model)

        def read(hidden: Tensor, non_loss_data: bool = True) -> Tensor:
            return then(last, batch, hidden)

        def loss(hidden: Tensor) -> tuple[Tensor, Tensor, LossOutput]:
            output = then(last, batch, hidden)
            set_balance_loss_weight(output.weight)
            # Megatron sums the weights over DP x CP, and all ranks of CP have the same rows.
            is_counted = batch.cp is None or batch.cp.rank() == 0
            weight = output.weight if is_counted else 0
            summed_weight = torch.tensor(weight, dtype=torch.int, device=hidden.device)
            return output.loss, summed_weight, output

        return hidden, read if forward_only else loss

    return get_forward_backward_func()(
        forward_step_func=forward_step,
        data_iterator=[iter(micro_batches) for _ in models],
        model=list(models),
        num_microbatches=len(micro_batches),
        seq_length=1,  # shapes travel with the tensors (variable_seq_lengths)
        micro_batch_size=1,
        forward_only=forward_only,
        collect_non_loss_data=forward_only,
    )


Read: TypeAlias = Callable[[TransformerModel, MicroBatch, Tensor], Tensor]
"""(last chunk of the model, micro-batch, its hidden states) -> result of the micro-batch."""


def read_log_probs(
    model: TransformerModel, batch: MicroBatch, hidden: Tensor, temperature: float
) -> TokenLogProbs:
    """Compute the trained tokens' log-probs and entropies, [tokens] each.

    A collective over the tensor- and context-parallel ranks.
    """
    vocab_size, group = model.architecture.vocab_size, model.tp_group

    def compute(states: Tensor, numbers: Tensor) -> Tensor:
        labels = batch.trained_ids[numbers.to(states.device)]
        settings = vocab_size, group, temperature
        return torch.stack(token_log_probs(states, model.output_weight, labels, *settings), dim=-1)

    full = model.full_hidden(hidden, partial_gradient=True)
    places = batch.prediction_places(batch.trained_mask)
    log_probs, entropies = compute_at(full, places, batch.cp, compute).unbind(-1)
    return TokenLogProbs(log_probs, entropies)


def read_values(
    model: TransformerModel, batch: MicroBatch, hidden: Tensor, slots: Tensor
) -> Tensor:
    """Compute the values for the slots marked in [rows, slots] bool, row after row, fp32.

    A slot's value is the score head's output one token before it (`prediction_places`). A
    collective over the context-parallel ranks, with sequence parallelism also over the
    tensor-parallel ones.
    """
    full = model.full_hidden(hidden, partial_gradient=False)
    places = batch.prediction_places(slots)
    return compute_at(full, places, batch.cp, lambda states, _: model.score(states))


def read_scores(model: TransformerModel, batch: MicroBatch, hidden: Tensor) -> Tensor:
    """Compute the score at each row's last token, [rows] fp32.

    A collective like `read_values`.
    """
    full = model.full_hidden(hidden, partial_gradient=False)
    return compute_at(full, batch.last_places(), batch.cp, lambda states, _: model.score(states))


def read_states(model: TransformerModel, batch: MicroBatch, hidden: Tensor) -> Tensor:
    """Return the hidden states that predict the trained tokens, [tokens, hidden], on the host.

    A collective like `read_values`.
    """
    full = model.full_hidden(hidden, partial_gradient=False)
    places = batch.prediction_places(batch.trained_mask)
    return compute_at(full, places, batch.cp, lambda states, _: states).cpu()


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

    def compute(own_states: Tensor, numbers: Tensor) -> Tensor:
        return full_kl(
            states[numbers].to(hidden.device),
            policy.output_weight,
            own_states,
            model.output_weight,
            model.architecture.vocab_size,
            model.tp_group,
            temperature,
        )

    full = model.full_hidden(hidden, partial_gradient=False)
    kl = compute_at(full, batch.prediction_places(batch.trained_mask), batch.cp, compute)
    return torch.stack((read_log_probs(model, batch, hidden, temperature).log_probs, kl))
