"""Findings of the checks in the installation guide for NPU (docs/npu.md)."""

from __future__ import annotations

from collections.abc import Iterator

from mindspeed_rlxf import device
from mindspeed_rlxf.config.enums import DeviceKind
from mindspeed_rlxf.device import driver, npu_install, npu_python, npu_versions
from mindspeed_rlxf.device.npu_install import Checked, Host
from mindspeed_rlxf.ops.doctor.findings import Finding, Status, judge


def check_install(kind: DeviceKind) -> list[Finding]:
    """Check driver, CANN and Python of an NPU host; [] on another device kind."""
    return list(map(_finding, _install(Host()))) if _is_npu(kind) else []


def check_cards(kind: DeviceKind, several_hosts: bool) -> list[Finding]:
    """Check cards and their network ports on an NPU host.

    [] on another device kind, and if the driver's tool fails or lists no card.
    """
    return list(map(_finding, _cards(Host(), several_hosts))) if _is_npu(kind) else []


def _is_npu(kind: DeviceKind) -> bool:
    return device.resolve_kind(kind) is DeviceKind.NPU


def _install(host: Host) -> Iterator[Checked]:
    yield from npu_install.check_driver(host)
    yield from npu_install.check_cann(host)
    yield from npu_python.check_python(npu_versions.read_versions())


def _cards(host: Host, several_hosts: bool) -> Iterator[Checked]:
    view = driver.query_driver(DeviceKind.NPU)
    if view is not None and view.devices:
        yield npu_install.describe_cards(view.devices)
        numbers = [each.index for each in view.devices]
        yield from npu_install.check_links(host, numbers, several_hosts)


def _finding(found: Checked) -> Finding:
    bad = Status.ERROR if found.fatal else Status.WARNING
    return judge(found.fine, found.name, found.value, found.remedy, bad)
