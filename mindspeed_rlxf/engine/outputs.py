"""Collect the results of micro-batches: metrics of a mini-batch, and rows of a batch."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from mindspeed_rlxf.algorithms.losses import LossOutput
from mindspeed_rlxf.device.copies import begin_download


def begin_reading_totals(outputs: Sequence[LossOutput]) -> Tensor:
    """Return all metrics' totals, [metrics, micro-batches], on the host.

    They are there after the host's next wait for the current stream (`begin_download`).
    """
    totals = []
    for name in outputs[0].metrics if outputs else ():
        of_outputs = []
        for output in outputs:
            # A plugin's may be on the host.
            of_outputs.append(output.metrics[name].total.to(output.loss.device))
        totals.append(torch.stack(of_outputs))
    return begin_download(torch.stack(totals)) if totals else torch.empty(0)


def average_metrics(
    outputs: Sequence[LossOutput],
    totals: Tensor,
    sum_over_replicas: Callable[[Tensor], Tensor],
) -> dict[str, float]:
    """Return metrics averaged over the mini-batch on all data-parallel ranks, by name.

    `totals` are those of `begin_reading_totals`, after a wait.
    A metric is 0 if its weights (token or sample counts) sum to 0. A rank before the last pipeline
    stage has no outputs, returns {} and takes no part in the sum.
    """
    if not outputs:
        return {}
    names = list(outputs[0].metrics)
    weights = []
    for name in names:
        weights.append(float(sum(output.metrics[name].weight for output in outputs)))
    sums = torch.stack([of_metric.sum() for of_metric in totals])
    local = torch.stack((sums, torch.tensor(weights).double()))
    totals, counts = sum_over_replicas(local)
    return dict(zip(names, (totals / counts.clamp(min=1)).tolist(), strict=True))


def scatter_rows(flat: Sequence[Tensor], mask: Tensor) -> Tensor:
    """Return [rows, width] fp32 on the CPU: the flat values at True mask elements, 0 elsewhere.

    Args:
        flat: Values per micro-batch, row after row; the micro-batches have consecutive rows.
        mask: [all rows, width] bool.
    """
    out = torch.zeros(mask.shape, dtype=torch.float32)
    out[mask] = torch.cat(list(flat)).cpu().float()
    return out
