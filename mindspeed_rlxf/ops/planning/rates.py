"""Rates of a device: seconds per unit of work."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from mindspeed_rlxf.config.memory import FP32
from mindspeed_rlxf.ops.planning.devices import SHARES, DeviceFigures
from mindspeed_rlxf.ops.planning.work import Kind, Work

TERA, GIGA = 1e12, 1e9


@dataclass(frozen=True)
class Costs:
    """Seconds per FLOP, per byte of device memory moved, per call of a layer, and per phase."""

    flop: float
    moved: float
    call: float
    start: float = 0.0


@dataclass(frozen=True)
class Rates:
    """Costs of each kind of work, and of transfers between devices and hosts.

    link, network, host: seconds per byte to a device of the host, to another host, to host memory
    message:             seconds per collective
    iteration_s:         seconds of an iteration outside its phases
    basis:               source of the figures, as text for people
    """

    costs: Mapping[Kind, Costs]
    link: float
    network: float
    host: float
    message: float
    iteration_s: float
    basis: str

    def seconds(self, kind: Kind, work: Work) -> float:
        """Return the seconds of one phase: the sum of all its costs, as if nothing overlapped."""
        own = self.costs[kind]
        computed = work.flop * own.flop + work.moved * own.moved + work.calls * own.call
        sent = work.link * self.link + work.network * self.network + work.host * self.host
        return own.start + computed + sent + work.messages * self.message


def published_rates(figures: DeviceFigures, itemsize: int) -> Rates:
    """Return the rates of a row of the device table, the same costs for each kind of work.

    The figures are reduced to the assumed SHARES. A row without a rate to the host gets the rate
    of SHARES. An iteration costs nothing beside its phases.
    itemsize: bytes of a weight; for fp32 a FLOP costs twice that of bf16
    """
    share, host = SHARES, figures.host_gb_s
    flop = figures.bf16_tflops * TERA * share.matrices / (2 if itemsize == FP32 else 1)
    costs = Costs(1 / flop, 1 / (figures.memory_gb_s * GIGA * share.memory), share.call_s)
    assumed = "" if host else f", assumed {share.host_gb_s:g} GB/s to the host"
    return Rates(
        dict.fromkeys(Kind, costs),
        1 / (figures.link_gb_s * GIGA * share.links),
        1 / (figures.network_gb_s * GIGA * share.links),
        1 / (host * GIGA * share.links if host else share.host_gb_s * GIGA),
        share.message_s,
        0.0,
        f"published figures of {figures.name} ({figures.source}), of which programs are assumed "
        f"to reach {share.matrices:.0%} (matrices), {share.memory:.0%} (memory) and "
        f"{share.links:.0%} (links){assumed}",
    )
