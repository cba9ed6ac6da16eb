"""Calibration files: costs of work measured on this machine, and the conditions of their use."""

from __future__ import annotations

import errno
import os
import platform
import tempfile
from datetime import datetime, timezone
from pathlib import Path
from typing import Annotated

import torch
from pydantic import ValidationError

from mindspeed_rlxf import device, packages
from mindspeed_rlxf.config.enums import DeviceKind
from mindspeed_rlxf.config.errors import Problem, UserError
from mindspeed_rlxf.config.fields import Section, Word, key
from mindspeed_rlxf.device import driver
from mindspeed_rlxf.files.plain import read_json
from mindspeed_rlxf.files.safe import replace_file
from mindspeed_rlxf.ops.planning.rates import Costs, Rates
from mindspeed_rlxf.ops.planning.work import Kind

VERSION = 1
AGAIN = "run `mindspeed-rlxf doctor --calibrate` on this host"
CPU_MODEL = Path("/proc/cpuinfo")


class MeasuredCosts(Section):
    """Costs of one kind of work, see `Costs`."""

    flop: float = key(..., "seconds of a FLOP", ge=0)
    moved: float = key(..., "seconds of a byte", ge=0)
    call: float = key(..., "seconds of a layer's call", ge=0)
    start: float = key(..., "seconds of a phase", ge=0)


class Calibration(Section):
    """Result of `doctor --calibrate`, and the device, settings and versions it is valid for."""

    version: int = key(..., "of this form")
    kind: Annotated[DeviceKind, Word] = key(..., "npu, cuda or cpu")
    device: str = key(..., "name of the device, or of the processor")
    threads: int = key(..., "device.cpu_threads", ge=1)
    bf16: bool = key(..., "precision of the models")
    torch: str = key(..., "version")
    megatron: str = key(..., "version")
    date: str = key(..., "of the measurement")
    costs: dict[str, MeasuredCosts] = key(..., "by kind of work")
    iteration_s: float = key(..., "seconds of an iteration outside of its phases", ge=0)
    worst: float = key(..., "largest relative error of the fit", ge=0)

    def rates(self, others: Rates | None) -> Rates:
        """Return the measured costs as Rates; costs of transfers come from `others`.

        others: None = transfers cost nothing. One process cannot measure transfers.
        """
        costs = {Kind(name): Costs(**dict(found)) for name, found in self.costs.items()}
        precision = "bf16" if self.bf16 else "fp32"
        basis = (
            f"measured on {self.device} on {self.date} in {precision} with {self.threads} "
            f"threads, fitted within {self.worst:.0%}"
        )
        if others is None:
            return Rates(costs, 0.0, 0.0, 0.0, 0.0, self.iteration_s, basis)
        links = (others.link, others.network, others.host, others.message)
        return Rates(costs, *links, self.iteration_s, f"{basis}; links: {others.basis}")


def default_file(kind: DeviceKind) -> Path:
    """Return the path of this user's calibration file for a kind of device; it may not exist.

    It is below XDG_CACHE_HOME, or ~/.cache if that is unset.
    """
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(cache) / "mindspeed_rlxf" / f"calibration-{device.resolve_kind(kind).value}.json"


def device_name(kind: DeviceKind) -> str | None:
    """Return the name of this host's first device, on CPU of its processor.

    None if the driver's tool lists no device, or fails.
    """
    view = driver.query_driver(device.resolve_kind(kind))
    if view is not None:
        return view.devices[0].name if view.devices else None
    text = CPU_MODEL.read_text(encoding="utf-8") if CPU_MODEL.exists() else ""
    names = [line.partition(":")[2].strip() for line in text.splitlines() if "model name" in line]
    return names[0] if names else platform.processor() or platform.machine()


def today() -> str:
    return datetime.now(timezone.utc).date().isoformat()


def versions() -> tuple[str, str]:
    """Return the installed versions of torch and Megatron ("none" if it is absent)."""
    return torch.__version__, packages.version(packages.MEGATRON) or "none"


def check_writable(file: Path) -> None:
    """Make the file's folder if needed. Raises UserError if no file can be written there."""
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=file.parent):
            pass
        if file.is_dir():
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
    except OSError as error:
        rule = f"must be a file that can be written ({error.strerror})"
        raise UserError(Problem("--to", rule, str(file), "give another path")) from None


def write_calibration(file: Path, calibration: Calibration) -> None:
    """Write the file atomically, readable by its owner only; make its folder if needed."""
    file.parent.mkdir(parents=True, exist_ok=True)
    replace_file(file, calibration.model_dump_json(indent=2) + "\n", 0o600)


def read_calibration(file: Path, kind: DeviceKind, threads: int, bf16: bool) -> Calibration:
    """Read a calibration file and check that it is valid on this host with these settings.

    Raises UserError if it cannot be read, has another form, or is of another model of device,
    version or setting.
    """
    name = f"plan.calibration={file}"
    try:
        found = Calibration.model_validate(read_json(file))
    except (OSError, ValueError, ValidationError) as error:
        cause = getattr(error, "strerror", None) or str(error).splitlines()[0]
        rule = f"must be a file of `doctor --calibrate`: {cause}"
        raise UserError(Problem(name, rule, remedy=AGAIN)) from error
    if rule := _find_mismatch(found, kind, threads, bf16):
        raise UserError(Problem(name, rule, remedy=AGAIN))
    return found


def _find_mismatch(found: Calibration, kind: DeviceKind, threads: int, bf16: bool) -> str:
    """Return the rule that the calibration breaks on this host with these settings; "" if none.

    Compares form, kind and name of the device (unless the name is unknown here), versions of torch
    and megatron-core, CPU threads and bf16, in this order; then it must have the costs of each
    `Kind`, and of nothing else.
    """
    there = device_name(kind)
    here = {
        "form": (found.version, VERSION),
        "kind of device": (found.kind.value, device.resolve_kind(kind).value),
        "device": (found.device, there or found.device),
        "version of torch": (found.torch, versions()[0]),
        "version of megatron-core": (found.megatron, versions()[1]),
        "device.cpu_threads": (found.threads, threads),
        "bf16": (found.bf16, bf16),
    }
    for what, (measured, wanted) in here.items():
        if measured != wanted:
            return f"must be of this host and run: its {what} is {measured}, here it is {wanted}"
    if set(found.costs) != {kind.value for kind in Kind}:
        return f"must hold costs of {', '.join(kind.value for kind in Kind)}"
    return ""
