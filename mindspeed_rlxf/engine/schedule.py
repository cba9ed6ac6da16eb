"""Run Megatron's schedule over micro-batches; results exist on the last pipeline stage only."""

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import torch
from megatron.core.pipeline_parallel import get_forward_backward_func
from torch import Tensor

from mindspeed_rlxf.algorithms.losses import LossOutput
from mindspeed_rlxf.engine.build import await_gathers
from mindspeed_rlxf.engine.micro_batch import MicroBatch
from mindspeed_rlxf.models.experts import set_balance_loss_weight
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
            # Filled on the device: `torch.tensor` would copy, and the host wait for the device.
            summed_weight = torch.full((), weight, dtype=torch.int, device=hidden.device)
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
