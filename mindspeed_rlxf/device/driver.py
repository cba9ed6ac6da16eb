"""List this host's devices with the driver's own tool, without claiming one."""

import contextlib
import re
import shutil
import subprocess
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

from mindspeed_rlxf.config.enums import DeviceKind

TOOL_S = 20.0  # npu-smi takes some seconds with 16 chips
KILL_S = 1.0
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
    """One device; for an NPU, a chip.

    Attributes:
        index: host-wide number.
        health: as reported by the tool; OK if it has no such column.
        memory_mib: total memory; 0 = unknown.
    """

    index: int
    name: str
    health: str
    memory_mib: int
    used_mib: int


Parsed: TypeAlias = tuple[str, list[DriverDevice]]


@dataclass(frozen=True)
class DriverView:
    """The driver tool's report. problem: why it failed; "" if it did not."""

    tool: str
    version: str
    devices: tuple[DriverDevice, ...]
    problem: str = ""


def query_driver(kind: DeviceKind) -> DriverView | None:
    """Run the driver's tool; return driver version and devices, or why they are unknown.

    None for a kind without driver: CPU, and AUTO, which must be resolved first.
    """
    if kind not in TOOLS:
        return None
    command, parse = TOOLS[kind]
    try:
        version, devices = parse(run_tool(command))
    except ValueError as problem:
        return DriverView(command[0], "", (), str(problem))
    return DriverView(command[0], version, tuple(devices))


def list_device_files(folder: Path = Path("/dev")) -> list[str]:
    """Return the sorted names of accelerator device files in `folder`, such as davinci0."""
    return sorted(file.name for file in folder.iterdir() if DEVICE_FILE.fullmatch(file.name))


def run_tool(command: Sequence[str], limit_s: float = TOOL_S) -> str:
    """Run a tool and return its stdout. Raises ValueError if it is missing, fails or hangs."""
    tool = command[0]
    if shutil.which(tool) is None:
        raise ValueError(f"{tool} is not on PATH")
    try:
        done = run_within(command, limit_s)
    except subprocess.TimeoutExpired:
        raise ValueError(f"{tool} gave no answer within {limit_s:g} s") from None
    except OSError as error:
        raise ValueError(f"{tool}: {error.strerror}") from error
    if done.returncode:
        output = (done.stderr or done.stdout).strip().rpartition("\n")[2][:300]
        raise ValueError(f"{tool} ended with {done.returncode}: {output}")
    return done.stdout


def run_within(command: Sequence[str], limit_s: float) -> subprocess.CompletedProcess[str]:
    """Run a program for at most `limit_s`; return its status, stdout and stderr.

    Raises TimeoutExpired, even if the program cannot be killed, e.g. while it waits for a driver:
    `subprocess.run` would wait for its end.
    """
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, errors="replace"
    )
    try:
        stdout, stderr = process.communicate(timeout=limit_s)
    except BaseException:
        process.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.communicate(timeout=KILL_S)
        raise
    return subprocess.CompletedProcess(command, process.returncode, stdout, stderr)


def parse_nvidia(text: str) -> Parsed:
    """Return (driver version, devices) from `0, NVIDIA H100 80GB HBM3, 81559, 4, 550.54` lines.

    The columns are index, name, total and used memory (MiB), and version.
    """
    version = ""
    devices = []
    for line in text.splitlines():
        cells = [cell.strip() for cell in line.split(",")]
        if len(cells) == 5 and cells[0].isdigit():
            index, name, *sizes, version = cells
            total, used = (int(size) if size.isdigit() else 0 for size in sizes)
            devices.append(DriverDevice(int(index), name, "OK", total, used))
    return version, devices


def parse_ascend(text: str) -> Parsed:
    """Return driver version ("" = missing) and chips from the `npu-smi info` table.

    A chip has two rows. Its index is the second row's second number (`Phy-ID`), counted across
    cards; if missing, the card number.
    """
    match = re.search(r"Version:\s*(\S+)", text)
    version = match[1] if match else ""
    table = text.partition("Process id")[0]
    devices = []
    upper_row: list[str] = []
    for line in table.splitlines():
        cells = [cell.strip() for cell in line.strip().strip("|").split("|")]
        if len(cells) != 3 or not cells[0][:1].isdigit():
            upper_row = []
        elif not upper_row:
            upper_row = cells
        else:
            card, name = upper_row[0].split(maxsplit=1)
            index = cells[0].split()[1] if " " in cells[0] else card
            used, total = (PAIR.findall(cells[2]) or [(0, 0)])[-1]
            devices.append(DriverDevice(int(index), name, upper_row[1], int(total), int(used)))
            upper_row = []
    return version, devices


TOOLS: dict[DeviceKind, tuple[Sequence[str], Callable[[str], Parsed]]] = {
    DeviceKind.CUDA: (NVIDIA, parse_nvidia),
    DeviceKind.NPU: (ASCEND, parse_ascend),
}
