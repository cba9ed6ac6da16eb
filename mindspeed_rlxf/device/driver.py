"""What the driver's own tool says about the devices of this host, without claiming one."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from mindspeed_rlxf.config.enums import DeviceKind

TOOL_S = 20.0  # npu-smi takes some seconds with 16 chips
NVIDIA = (
    "nvidia-smi",
    "--query-gpu=index,name,memory.total,memory.used,driver_version",
    "--format=csv,noheader,nounits",
)
ASCEND = ("npu-smi", "info")
DEVICE_FILE = re.compile(r"davinci\d+|nvidia\d+")
PAIR = re.compile(r"(\d+)\s*/\s*(\d+)")


@dataclass(frozen=True)
class DriverDevice:
    """One device, in NPU terms a chip. health: the tool's word; OK where it has none."""

    index: int
    name: str
    health: str
    memory_mib: int
    used_mib: int


@dataclass(frozen=True)
class DriverView:
    """tool: that answered; problem: why there is no answer, empty where there is one."""

    tool: str
    version: str
    devices: tuple[DriverDevice, ...]
    problem: str = ""


def driver_view(kind: DeviceKind) -> DriverView | None:
    """None where the kind has no driver (CPU)."""
    if kind is DeviceKind.CUDA:
        return _ask(NVIDIA, parse_nvidia)
    if kind is DeviceKind.NPU:
        return _ask(ASCEND, parse_ascend)
    return None


def device_files(folder: Path = Path("/dev")) -> list[str]:
    """Of accelerators; what a container was given."""
    return sorted(file.name for file in folder.iterdir() if DEVICE_FILE.fullmatch(file.name))


def _ask(command, parse) -> DriverView:  # type: ignore[no-untyped-def]
    tool = command[0]
    if shutil.which(tool) is None:
        return DriverView(tool, "", (), f"{tool} is not on PATH")
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=TOOL_S, errors="replace"
        )
    except subprocess.TimeoutExpired:
        return DriverView(tool, "", (), f"{tool} gave no answer within {TOOL_S:g} s")
    except OSError as error:
        return DriverView(tool, "", (), f"{tool}: {error.strerror}")
    if done.returncode:
        said = " ".join((done.stderr or done.stdout).split())[:200]
        return DriverView(tool, "", (), f"{tool} ended with {done.returncode}: {said}")
    version, devices = parse(done.stdout)
    return DriverView(tool, version, tuple(devices))


def parse_nvidia(text: str) -> tuple[str, list[DriverDevice]]:
    """Lines `0, NVIDIA H100 80GB HBM3, 81559, 4, 550.54`; driver version and devices."""
    version, devices = "", []
    for line in text.splitlines():
        cells = [cell.strip() for cell in line.split(",")]
        if len(cells) == 5 and cells[0].isdigit():
            version = cells[4]
            sizes = [int(cell) if cell.isdigit() else 0 for cell in cells[2:4]]
            devices.append(DriverDevice(int(cells[0]), cells[1], "OK", *sizes))
    return version, devices


def parse_ascend(text: str) -> tuple[str, list[DriverDevice]]:
    """The table of `npu-smi info`: two rows a chip, then a table of processes.

    Chips of one card are numbered on: the device's number is the third of the second row where
    there is one (`Phy-ID`), else that of the card.
    """
    found = re.search(r"Version:\s*(\S+)", text)
    return (found[1] if found else ""), list(_chips(text.partition("Process id")[0]))


def _chips(table: str) -> Iterator[DriverDevice]:
    first: list[str] | None = None
    for line in table.splitlines():
        cells = [cell.strip() for cell in line.strip().strip("|").split("|")]
        if len(cells) != 3 or not cells[0][:1].isdigit():
            first = None
        elif first is None:
            first = cells
        else:
            card, name = first[0].split(maxsplit=1)
            numbers = cells[0].split()
            index = int(numbers[1]) if len(numbers) > 1 else int(card)
            sizes = PAIR.findall(cells[2])
            used, total = sizes[-1] if sizes else ("0", "0")
            yield DriverDevice(index, name.strip(), first[1], int(total), int(used))
            first = None
