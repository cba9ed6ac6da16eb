"""Fit non-negative costs per unit of work to measured seconds."""

from __future__ import annotations

from itertools import combinations

import numpy as np


def fit(counts: np.ndarray, seconds: np.ndarray) -> tuple[list[float], float]:
    """Return the costs >= 0 with the least relative squared error of `counts @ costs` to `seconds`.

    counts:  [phases, few] fp64; seconds: [phases] fp64, above 0
    Returns the cost of each column, and the largest relative error of a phase.
    Tries every subset of the columns: the best one is the solution of non-negative least squares
    (Lawson and Hanson, 1974, chapter 23).
    """
    relative = counts / seconds[:, None]
    scale = np.abs(relative).max(axis=0)
    scale[scale == 0] = 1.0
    width, best, costs = counts.shape[1], np.inf, np.zeros(counts.shape[1])
    for size in range(1, width + 1):
        for columns in map(list, combinations(range(width), size)):
            part = relative[:, columns] / scale[columns]
            found, *_ = np.linalg.lstsq(part, np.ones(len(seconds)), rcond=None)
            residual = float(((part @ found - 1) ** 2).sum())
            if (found >= 0).all() and residual < best - 1e-12:
                best, costs = residual, np.zeros(width)
                costs[columns] = found / scale[columns]
    error = float(np.abs(counts @ costs / seconds - 1).max())
    return costs.tolist(), error
