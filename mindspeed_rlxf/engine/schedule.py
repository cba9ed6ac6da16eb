"""Run Megatron's schedule over micro-batches, and average their loss metrics."""

from collections.abc import Callable, Sequence
from typing import Any

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
        hidden = model(batch.token_ids, batch.positions, batch.attend)
        await_gathers(model)

        def read(hidden: Tensor, non_loss_data: bool = True) -> Tensor:
            return then(last, batch, hidden)

        def loss(hidden: Tensor) -> tuple[Tensor, Tensor, LossOutput]:
            output = then(last, batch, hidden)
            set_balance_loss_weight(output.weight)
            weight = torch.tensor(output.weight, dtype=torch.int, device=hidden.device)
            return output.loss, weight, output

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


def average_metrics(
    outputs: Sequence[LossOutput], sum_over_replicas: Callable[[Tensor], Tensor]
) -> dict[str, float]:
    """Return metrics averaged over the mini-batch on all data-parallel ranks, by name.

    A metric is 0 if its weights (token or sample counts) sum to 0. A rank before the last pipeline
    stage has no outputs, returns {} and takes no part in the sum.
    """
    if not outputs:
        return {}
    names = list(outputs[0].metrics)
    found = [[output.metrics[name] for output in outputs] for name in names]
    sums = torch.stack([torch.stack([m.total.cpu() for m in of]).sum() for of in found])
    weights = torch.tensor([float(sum(m.weight for m in of)) for of in found])
    totals, counts = sum_over_replicas(torch.stack((sums, weights.double())))
    return dict(zip(names, (totals / counts.clamp(min=1)).tolist(), strict=True))
