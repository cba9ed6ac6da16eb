"""Predict the time of an iteration by phase, from counts of work and rates of the device."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from mindspeed_rlxf import device
from mindspeed_rlxf.config.enums import DeviceKind
from mindspeed_rlxf.config.errors import Problem, UserError
from mindspeed_rlxf.config.memory import itemsize
from mindspeed_rlxf.config.schema import RunConfig
from mindspeed_rlxf.ops.planning.calibration import default_file, read_calibration
from mindspeed_rlxf.ops.planning.devices import TABLE, USUAL
from mindspeed_rlxf.ops.planning.rates import Rates, published_rates
from mindspeed_rlxf.ops.planning.work import PhaseWork, Stage, iteration_work, mean_lengths
from mindspeed_rlxf.reporting.table import table


@dataclass(frozen=True)
class Prediction:
    """Predicted seconds of each phase, and of an iteration, in which pools work in parallel."""

    phases: tuple[tuple[PhaseWork, float], ...]
    iteration_s: float


@dataclass(frozen=True)
class KnownRates:
    """Rates for the prediction, None = there are none; note: why a calibration is not used"""

    rates: Rates | None
    note: str = ""


def find_rates(config: RunConfig) -> KnownRates:
    """Return the rates of `plan.calibration`, else of this user's calibration, else published ones.

    The user's file is skipped, with a note, if it is not valid here, and unread if `plan.device` is
    set. Raises UserError if `plan.calibration` is not valid here, or `plan.device` is unknown or of
    another kind than the run's devices.
    """
    kind, given = device.resolve_kind(config.device.kind), config.plan
    others = _find_published_rates(config, kind)
    bf16, threads = config.actor_rollout.bf16, config.device.cpu_threads
    if given.calibration is not None:
        file = Path(given.calibration)
        return KnownRates(read_calibration(file, kind, threads, bf16).rates(others))
    if given.device is None and (file := default_file(kind)).exists():
        try:
            return KnownRates(read_calibration(file, kind, threads, bf16).rates(others))
        except UserError as error:
            return KnownRates(others, f"not used: {error.problems[0]}")
    return KnownRates(others)


def _find_published_rates(config: RunConfig, kind: DeviceKind) -> Rates | None:
    """Return the published rates of `plan.device`, else of the kind's usual device.

    None if neither exists, as on CPU. Raises UserError if the device is unknown or of another kind.
    """
    name = config.plan.device or USUAL.get(kind)
    if name is None:
        return None
    if name not in TABLE:
        known = ", ".join(TABLE)
        raise UserError(Problem("plan.device", f"must be one of {known}", name, "correct it"))
    if TABLE[name].kind is not kind:
        rule = f"must be a device of device.kind={kind.value}"
        names = ", ".join(each for each, row in TABLE.items() if row.kind is kind) or "none"
        raise UserError(Problem("plan.device", rule, name, f"there are: {names}"))
    return published_rates(TABLE[name], itemsize(config.actor_rollout))


def predict(config: RunConfig, rates: Rates) -> Prediction:
    """Predict the seconds of an iteration and of its phases.

    An iteration takes `rates.iteration_s`, and for each stage the time of its slowest pool; a
    pool's time in a stage is the sum of its phases.
    """
    phases = tuple((each, rates.seconds(each.kind, each.work)) for each in iteration_work(config))
    total = rates.iteration_s
    for stage in Stage:
        pools: dict[str, float] = {}
        for each, seconds in phases:
            if each.stage is stage:
                pools[each.pool] = pools.get(each.pool, 0.0) + seconds
        total += max(pools.values(), default=0.0)
    return Prediction(phases, total)


def show_prediction(config: RunConfig, known: KnownRates) -> str:
    """Return the plan's section on the predicted time; without rates, how to measure them."""
    note = f"\n  {known.note}" if known.note else ""
    if known.rates is None:
        kind = device.resolve_kind(config.device.kind).value
        how = "measure them with `mindspeed-rlxf doctor --calibrate`"
        return f"  no rates are known of a {kind}; {how}{note}"
    made, lengths = predict(config, known.rates), mean_lengths(config)
    rows: list[list[object]] = [
        ["phase", "role", "pool", "TFLOP", "GB moved", "GB sent", "GB to host", "seconds", "share"]
    ]
    for each, seconds in made.phases:
        work = each.work
        sizes = (
            work.flop / 1e12,
            work.moved / 1e9,
            (work.link + work.network) / 1e9,
            work.host / 1e9,
        )
        share = f"{seconds / made.iteration_s:.0%}"
        shown = [f"{size:,.3g}" if size < 1000 else f"{size:,.0f}" for size in sizes]
        rows.append([each.name, each.role.value, each.pool, *shown, f"{seconds:.3g}", share])
    tokens = config.samples_per_iteration * lengths.total
    return (
        f"{table(rows)}\n  predicted: {_time(made.iteration_s)} an iteration, "
        f"{tokens / made.iteration_s:,.0f} tokens/s, with {lengths.prompt} + {lengths.response} "
        f"tokens a sample\n  based on: {known.rates.basis}{note}"
    )


def _time(seconds: float) -> str:
    return f"{seconds:,.0f} s" if seconds >= 100 else f"{seconds:.3g} s"
