"""Check that driver, torch, Ray and variables agree on the accelerators of this host."""

from __future__ import annotations

import os
from collections.abc import Iterator

from mindspeed_rlxf import device
from mindspeed_rlxf.config.enums import DeviceKind
from mindspeed_rlxf.device.driver import DriverView, list_device_files, query_driver
from mindspeed_rlxf.ops.doctor.findings import Finding, Status, describe, error, judge, ok, warning

GOOD = ("OK", "")
BUSY_MIB = 4096  # the driver itself takes up to 3 GiB of an idle device


def check_devices(kind: DeviceKind) -> list[Finding]:
    """Return findings on this host's accelerators: kind, the driver's list, torch's number.

    The driver is asked for NPU and CUDA only. On CPU there is one finding, a warning if /dev has
    device files. An exception of torch is the only finding, an error.
    """
    try:
        kind = device.resolve_kind(kind)
        counted = device.count_by_torch(kind)
    except Exception as problem:
        return [
            error(
                "devices.torch", describe(problem), "mend the installation, or set device.kind=cpu"
            )
        ]
    if kind is DeviceKind.CPU:
        unused = list_device_files()
        value = f"cpu, though there are {', '.join(unused)}" if unused else "cpu, no accelerator"
        return [
            judge(
                not unused,
                "devices.kind",
                value,
                "install the build of torch (and its plug-in) for these devices",
            )
        ]
    assert counted is not None, "only CPU counts none"
    view = query_driver(kind)
    assert view is not None, "an accelerator has a driver"
    visible = device.visible_devices_variable(kind)
    hidden = os.environ.get(visible) if visible else None
    return [
        ok("devices.kind", kind.value),
        *driver_findings(view),
        count_finding(kind, counted, view, hidden),
    ]


def driver_findings(view: DriverView) -> Iterator[Finding]:
    """Yield findings on the driver's devices: number (none: an error), sick ones, busy ones.

    Sick ones are an error; busy ones, with over BUSY_MIB and a tenth of the memory in use, are a
    warning. Without any, nothing is yielded on them. A driver's tool that failed is one warning and
    nothing else.
    """
    if view.problem:
        remedy = "install the driver's tool, or mount it and /dev into the container"
        yield warning("devices.driver", view.problem, remedy)
        return
    names = ", ".join(dict.fromkeys(each.name for each in view.devices)) or "no device"
    value = f"{len(view.devices)} x {names}, driver {view.version}"
    remedy = f"{view.tool} lists none: look at the driver's log"
    yield judge(bool(view.devices), "devices.driver", value, remedy, Status.ERROR)
    sick = [f"{each.index}: {each.health}" for each in view.devices if each.health not in GOOD]
    if sick:
        remedy = "reset or replace the device, and leave this host out until then"
        yield error("devices.health", ", ".join(sick), remedy)
    busy = [
        f"{each.index}: {each.used_mib} of {each.memory_mib} MiB"
        for each in view.devices
        if each.used_mib > max(BUSY_MIB, each.memory_mib // 10)
    ]
    if busy:
        yield warning(
            "devices.memory",
            f"in use on {', '.join(busy)}",
            "end the processes that hold them, unless they are a run of yours",
        )


def count_finding(kind: DeviceKind, counted: int, view: DriverView, hidden: str | None) -> Finding:
    """Check that torch sees as many devices as the driver lists and the variable leaves visible.

    An error if not, or if torch sees none. If the driver's tool failed, only the latter.
    counted: devices by torch; hidden: value of the visibility variable, None = not set
    """
    variable = device.visible_devices_variable(kind)
    wanted, shown = len(view.devices), f"torch sees {counted}"
    if hidden is not None:
        shown += f" ({variable}={hidden})"
        wanted = min(wanted, sum(bool(word.strip()) for word in hidden.split(",")))
    if counted == 0:
        return error("devices.torch", shown, f"look at driver and installation, and at {variable}")
    if not view.problem and counted != wanted:
        return error(
            "devices.torch",
            f"{shown}, the driver offers {wanted}",
            f"driver, /dev of the container and {variable} have to name the same",
        )
    return ok("devices.torch", shown)


def ray_finding(resource: str, count: int, most: int) -> Finding:
    """Return `ok` if `count` is `most`, else a warning.

    count: devices that Ray offers on a host; most: the highest number on any host
    """
    return judge(
        count == most,
        "devices.ray",
        f"Ray offers {count} {resource}, other hosts up to {most}",
        f"`ray start ... --resources='{{\"{resource}\": {most}}}'` on this host",
    )
