"""The stage that compares an update with all options, without any, and without one at a time.

An option changes how a device works and not what it computes: `agrees` says whether gradient norm
and log-probs are those of an update without options. A new option is one more line of OPTIONS.
"""

from __future__ import annotations

import gc
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from .engines import build_actor, joined, seconds
from .settings import Figures, Settings

AGREEMENT = 0.02  # of bf16: largest relative difference


@dataclass(frozen=True)
class Option:
    """A way to compute an update that can be switched off.

    Attributes:
        name: in the line.
        on: keys of `actor_rollout` that switch it on.
        operators: of `device.kernels`, which are tried with it.
    """

    name: str
    on: Mapping[str, Any] = field(default_factory=dict)
    operators: Sequence[str] = ()


OPTIONS: tuple[Option, ...] = (
    Option("attention", operators=["ATTENTION", "SHARED_PROMPTS"]),
    Option("norm", operators=["NORM"]),
    Option("rotary", operators=["ROTARY"]),
    Option("swiglu", operators=["SWIGLU"]),
    Option("gradient", operators=["GRADIENT"]),
    Option(
        "overlap",
        on={
            "use_distributed_optimizer": True,
            "overlap_grad_reduce": True,
            "overlap_param_gather": True,
        },
    ),
)
FSDP_OPTIONS = (Option("reduction in each micro-batch", on={"reduce_each_micro_batch": True}),)


def options(settings: Settings, shape: str, engine: str = "megatron") -> Figures:
    """Measure updates with an engine: without options, with all, without each."""
    results: dict[str, Figures] = {}
    compared = OPTIONS if engine == "megatron" else FSDP_OPTIONS
    with joined(settings, megatron=engine == "megatron"):
        results["none"] = measure(settings, shape, engine, [])
        results["all"] = measure(settings, shape, engine, compared)
        for option in compared if len(compared) > 1 else ():
            others = [other for other in compared if other is not option]
            results[f"without {option.name}"] = measure(settings, shape, engine, others)
    for figures in results.values():
        figures["agrees"] = agrees(figures, results["none"])
    return {"options": results}


def measure(settings: Settings, shape: str, engine: str, chosen: Sequence[Option]) -> Figures:
    """Measure an update with the chosen options, or return its error."""
    from mindspeed_rlxf import device
    from mindspeed_rlxf.device import kernels

    table = kernels.TABLE
    operators = {name for option in chosen for name in option.operators}
    kernels.TABLE = tuple(row for row in table if row.operator.name in operators)
    kernels.find.cache_clear()
    keys = {name: value for option in chosen for name, value in option.on.items()}
    try:
        actor, _ = build_actor(settings, shape, engine, **keys)
        log_probs = actor.experience.old_log_probs
        first = actor.role.update_policy(actor.rollouts, actor.experience, actor.all_rows)
        times = [seconds(actor.update) for _ in range(settings.sizes.repeats)]
    except Exception as error:  # whatever a library of the device raises
        return {"error": f"{type(error).__name__}: {error}"[:300]}
    finally:
        kernels.TABLE = table
    figures = {
        "update_s": round(statistics.median(times), 4),
        "grad_norm": float(first.report.steps[0]["grad_norm"]),
        "log_prob": float(log_probs.sum() / (log_probs != 0).sum()),
    }
    del actor
    gc.collect()
    device.release_cache()
    return figures


def agrees(figures: Figures, reference: Figures) -> bool:
    """Return whether gradient norm and mean log-prob are near those of the reference."""
    if "error" in figures or "error" in reference:
        return False
    pairs = [(figures[name], reference[name]) for name in ("grad_norm", "log_prob")]
    return all(abs(one - other) <= AGREEMENT * abs(other) for one, other in pairs)
