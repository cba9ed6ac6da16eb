"""The stage that compares decode steps in graphs with those launched kernel by kernel."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any
from unittest.mock import patch

from .engines import build_pair, joined, seconds
from .settings import Figures, Settings


def graphs(settings: Settings, shape: str) -> Figures:
    """Measure the native engine with and without graphs, and compare what both sample.

    Responses of four lengths are compared, so that rows are padded, and of one length are timed. A
    CPU has a stand-in for graphs, which says nothing about speed.
    """
    if settings.device == "npu":
        return {"skipped": "graphs are CUDA's"}
    with joined(settings):
        from mindspeed_rlxf.rollout import decode_graphs
        from tests.recorded_steps import RecordedSteps

        pool = RecordedSteps if settings.device == "cpu" else decode_graphs.GraphPool
        with patch.object(decode_graphs, "GraphPool", pool):
            return measure(build_pair(settings, shape), settings)


def measure(pair: Any, settings: Settings) -> Figures:
    """Return the figures of the pair's native engine."""
    rows, new_tokens = settings.sizes.decode
    unequal = [new_tokens * (1 + row % 4) // 4 for row in range(rows)]
    responses = {}
    times: dict[bool, list[float]] = {False: [], True: []}
    for with_graphs in times:
        pair.engine.decode_graphs = with_graphs
        responses[with_graphs] = pair.responses(unequal)
    for _ in range(settings.sizes.repeats):
        for with_graphs, all_s in times.items():
            pair.engine.decode_graphs = with_graphs
            all_s.append(seconds(lambda: pair.ours([new_tokens] * rows)))
    step_ms = {way: 1e3 * statistics.median(all_s) / new_tokens for way, all_s in times.items()}
    return {
        "rows": rows,
        "new_tokens": new_tokens,
        "dtype": "bf16",
        "step_ms": round(step_ms[False], 2),
        "graphs_step_ms": round(step_ms[True], 2),
        "ratio": round(step_ms[False] / step_ms[True], 2),
        **compare(responses[False], responses[True]),
    }


def compare(plain: Sequence[Any], replayed: Sequence[Any]) -> Figures:
    """Return the fraction of tokens before responses part, and how far their log-probs are off.

    `off_by` is the largest difference. Rounding may draw another token, after which all differ.
    """
    num_tokens = num_equal = 0
    off_by = 0.0
    for one, other in zip(plain, replayed, strict=True):
        num_tokens += len(one.tokens)
        rows = zip(one.tokens, other.tokens, one.log_probs, other.log_probs, strict=True)
        for token, other_token, log_prob, other_log_prob in rows:
            if token != other_token:
                break
            num_equal += 1
            off_by = max(off_by, abs(log_prob - other_log_prob))
    return {"equal_tokens": num_equal / num_tokens, "off_by": off_by}
