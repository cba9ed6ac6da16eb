"""Accelerators of this host as the driver, torch, Ray and the variables see them."""

from __future__ import annotations

import os

from mindspeed_rlxf import device
from mindspeed_rlxf.config.enums import DeviceKind
from mindspeed_rlxf.device.driver import DriverView, device_files, driver_view
from mindspeed_rlxf.ops.doctor.findings import Finding, error, ok, warning

GOOD = ("OK", "")
BUSY_MIB = 4096  # of a device that nobody uses the driver itself holds up to 3 GiB


def look(kind: DeviceKind) -> list[Finding]:
    """Raises nothing of its own: what torch cannot say is a finding."""
    try:
        kind = device.resolve_kind(kind)
        counted = device.seen_by_torch(kind)
    except Exception as problem:
        said = " ".join(str(problem).split())
        return [error("devices.torch", said, "mend the installation, or set device.kind=cpu")]
    if kind is DeviceKind.CPU:
        unused = device_files()
        if unused:
            value = f"cpu, though there are {', '.join(unused)}"
            remedy = "install the build of torch (and its plug-in) for these devices"
            return [warning("devices.kind", value, remedy)]
        return [ok("devices.kind", "cpu: no accelerator here")]
    assert counted is not None, "only CPU counts none"
    view = driver_view(kind)
    assert view is not None, "an accelerator has a driver"
    visible = device.visible_devices_variable(kind)
    hidden = os.environ.get(visible) if visible else None
    return [
        ok("devices.kind", kind.value),
        *driver_findings(view),
        count_finding(kind, counted, view, hidden),
    ]


def driver_findings(view: DriverView) -> list[Finding]:
    """What the driver's tool says: health and who uses the memory."""
    if view.problem:
        remedy = "install the driver's tool, or mount it and /dev into the container"
        return [warning("devices.driver", view.problem, remedy)]
    names = ", ".join(dict.fromkeys(each.name for each in view.devices)) or "no device"
    found = [ok("devices.driver", f"{len(view.devices)} x {names}, driver {view.version}")]
    if not view.devices:
        found = [error("devices.driver", f"{view.tool} lists none", "look at the driver's log")]
    sick = [f"{each.index}: {each.health}" for each in view.devices if each.health not in GOOD]
    if sick:
        remedy = "reset or replace the device, and leave this host out until then"
        found.append(error("devices.health", ", ".join(sick), remedy))
    busy = [
        f"{each.index}: {each.used_mib} of {each.memory_mib} MiB"
        for each in view.devices
        if each.used_mib > max(BUSY_MIB, each.memory_mib // 10)
    ]
    if busy:
        remedy = "end the processes that hold them, unless they are a run of yours"
        found.append(warning("devices.memory", f"in use on {', '.join(busy)}", remedy))
    return found


def count_finding(kind: DeviceKind, counted: int, view: DriverView, hidden: str | None) -> Finding:
    """torch sees what the driver has, less what a variable hides."""
    variable = device.visible_devices_variable(kind)
    wanted = len(view.devices)
    if hidden is not None:
        chosen = [word for word in hidden.split(",") if word.strip()]
        wanted = min(wanted, len(chosen)) if not view.problem else len(chosen)
    shown = f"torch sees {counted}" + (f" ({variable}={hidden})" if hidden is not None else "")
    if counted == 0:
        remedy = f"look at driver and installation, and at {variable}"
        return error("devices.torch", shown, remedy)
    if not view.problem and counted != wanted:
        remedy = f"driver, /dev of the container and {variable} have to name the same"
        return error("devices.torch", f"{shown}, the driver offers {wanted}", remedy)
    return ok("devices.torch", shown)


def ray_finding(resource: str, count: int, counted: int | None) -> Finding:
    """count: devices that this host's Ray node offers; counted: that torch sees."""
    value = f"Ray offers {count} {resource}"
    if counted is None or count == counted:
        return ok("devices.ray", value)
    remedy = f"`ray start ... --resources='{{\"{resource}\": {counted}}}'` on this host"
    return warning("devices.ray", f"{value}, torch sees {counted}", remedy)
