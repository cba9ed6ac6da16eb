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
    found = [[output.metrics[name] for output in outputs] for name in names]
    sums = torch.stack([torch.stack([m.total.cpu() for m in of]).sum() for of in found])
    weights = torch.tensor([float(sum(m.weight for m in of)) for of in found])
    totals, counts = sum_over_replicas(torch.stack((sums, weights.double())))
    return dict(zip(names, (totals / counts.clamp(min=1)).tolist(), strict=True))


def scatter_rows(flat: Sequence[Tensor], mask: Tensor) -> Tensor:
    """Return [rows, width] fp32 on the CPU: the flat values at True mask elements, 0 elsewhere.

    Args:
        flat: Values per micro-batch, row after row; the micro-batches have consecutive rows.
        mask: [all rows, width] bool.
    """
    out = torch.zeros(mask.shape, dtype=torch.float32)
    out[mask] = torch.cat([part.cpu() for part in flat]).float()
    return out
