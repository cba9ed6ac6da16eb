"""Collect the results of micro-batches: metrics of a mini-batch, and rows of a batch."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from mindspeed_rlxf.algorithms.losses import LossOutput


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
    sums = []
    weights = []
    for name in names:
        metrics = [output.metrics[name] for output in outputs]
        sums.append(torch.stack([metric.total.cpu() for metric in metrics]).sum())
        weights.append(float(sum(metric.weight for metric in metrics)))
    local = torch.stack((torch.stack(sums), torch.tensor(weights).double()))
    totals, counts = sum_over_replicas(local)
    return dict(zip(names, (totals / counts.clamp(min=1)).tolist(), strict=True))


def scatter_rows(flat: Sequence[Tensor], mask: Tensor) -> Tensor:
    """Return [rows, width] fp32 on the CPU: the flat values at True mask elements, 0 elsewhere.

    Args:
        flat: Values per micro-batch, row after row; the micro-batches have consecutive rows.
        mask: [all rows, width] bool.
    """
    out = torch.zeros(mask.shape, dtype=torch.float32)
    out[mask] = torch.cat([values.cpu() for values in flat]).float()
    return out
