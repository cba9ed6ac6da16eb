"""Check the parts of an NPU host that are not Python: driver, firmware, /dev, CANN, ATB, links.

docs/npu.md has the paths, packages and commands with their sources. No library of CANN is loaded.
"""

from __future__ import annotations

import ctypes.util
import os
import platform
import re
import shutil
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from mindspeed_rlxf.device import driver, npu
from mindspeed_rlxf.device.npu_versions import read_text

DRIVER = "/usr/local/Ascend/driver"
DRIVER_VERSION = f"{DRIVER}/version.info"
DRIVER_LIBRARIES = f"{DRIVER}/lib64"
DEVICE_FILES = ("/dev/davinci_manager", "/dev/devmm_svm", "/dev/hisi_hdc")
# The first path is that of CANN 8.5 and later.
SET_ENV = ("/usr/local/Ascend/cann/set_env.sh", "/usr/local/Ascend/ascend-toolkit/set_env.sh")
SET_ENV_ATB = "/usr/local/Ascend/nnal/atb/set_env.sh"
KERNELS = "built-in/op_impl/ai_core/tbe/kernel"
HCCN_TOOL = f"{DRIVER}/tools/hccn_tool"
UNKNOWN = "unknown"
BOARD = ("npu-smi", "info", "-t", "board", "-i")
MOUNTS = " ".join(f"--device {name}" for name in DEVICE_FILES) + f" -v {DRIVER}:{DRIVER}"
IN_CONTAINER = f"in a container: --device /dev/davinci0 (one for each) {MOUNTS}"


class Checked(NamedTuple):
    """The result of one check: `fine` or not. fatal: a failure is an error, not a warning"""

    name: str
    fine: bool
    value: str
    remedy: str
    fatal: bool = False


class Host(NamedTuple):
    """The host to inspect. root: the folder that stands for `/`; run: returns a command's output"""

    root: Path = Path("/")
    environment: Mapping[str, str] = os.environ
    run: Callable[[Sequence[str]], str] = driver.run_tool

    def path(self, name: str) -> Path:
        return self.root / name.lstrip("/")


def check_driver(host: Host) -> Iterator[Checked]:
    """Yield four results, in order: driver, its libraries, device files, firmware.

    It is an error if the driver's version file has no version, a warning if its libraries are
    neither in a folder of LD_LIBRARY_PATH nor found by the linker.
    """
    version = host.path(DRIVER_VERSION)
    found = re.search(r"^Version=(\S+)", read_text(version), re.M)
    yield Checked(
        "npu.driver",
        found is not None,
        f"{DRIVER_VERSION}: {found[1] if found else 'missing'}",
        f"install the driver on the host, then the firmware; {IN_CONTAINER}",
        fatal=True,
    )
    folders = _folders(host, "LD_LIBRARY_PATH")
    listed = any(DRIVER_LIBRARIES in folder for folder in folders)
    yield Checked(
        "npu.driver_libraries",
        listed or ctypes.util.find_library("ascend_hal") is not None,
        f"{DRIVER_LIBRARIES} {'is' if listed else 'is not'} on LD_LIBRARY_PATH",
        f"export LD_LIBRARY_PATH={DRIVER_LIBRARIES}:{DRIVER_LIBRARIES}/common:"
        f"{DRIVER_LIBRARIES}/driver:$LD_LIBRARY_PATH, before `ray start`",
    )
    yield _check_device_files(host)
    yield _check_firmware(host)


def _check_device_files(host: Host) -> Checked:
    folder = host.path("/dev")
    devices = driver.list_device_files(folder) if folder.is_dir() else []
    missing = [name for name in DEVICE_FILES if not host.path(name).exists()]
    numbered = [name for name in devices if name.startswith("davinci")]
    lacking = ", ".join([*missing, *(() if numbered else ["/dev/davinci<N>"])])
    return Checked(
        "npu.device_files",
        not lacking,
        f"missing: {lacking}" if lacking else f"{len(numbered)} of /dev/davinci<N>, and managers",
        f"look at the driver's log on the host; {IN_CONTAINER}",
        fatal=True,
    )


def _check_firmware(host: Host) -> Checked:
    """Check that the firmware's "Compatibility" in npu-smi's facts on card 0 is not NOK.

    Compatibility that is not reported passes as "unknown"; npu-smi without an answer is a warning.
    """
    name, remedy = "npu.firmware", "install the firmware that the driver's release names"
    try:
        text = host.run((*BOARD, "0"))
    except ValueError as problem:
        return Checked(name, False, str(problem), f"`{' '.join(BOARD)} 0` by hand")
    facts = dict(re.findall(r"^\s*([A-Z][\w ]*?)\s*:\s*(\S.*?)\s*$", text, re.M))
    version, fits = facts.get("Firmware Version", "unknown"), facts.get("Compatibility", "unknown")
    value = f"{version}, compatibility with the driver {fits} (card 0)"
    return Checked(name, fits != "NOK", value, remedy, fatal=True)


def check_cann(host: Host) -> Iterator[Checked]:
    """Yield four results, in order: CANN's environment, its Python folder, operators, library ATB.

    The environment passes if the variables of HOME name one folder, links followed; if they name
    none, only this result is yielded. The Python folder passes if it is on PYTHONPATH or absent.
    """
    homes = {name: host.environment[name] for name in npu.HOME if host.environment.get(name)}
    script = _find_script(host)
    real = {Path(home).resolve() for home in homes.values()}
    shown = ", ".join(f"{name}={home}" for name, home in homes.items())
    yield Checked(
        "npu.set_env",
        len(real) == 1,
        shown or f"neither {' nor '.join(npu.HOME)} is set",
        f"`source {script}` alone, in a new shell, before `ray start` and the run",
        fatal=True,
    )
    if not homes:
        return
    home = Path(next(iter(homes.values())))
    python = home / "python" / "site-packages"
    entries = {Path(folder).resolve() for folder in _folders(host, "PYTHONPATH")}
    kept = python.resolve() in entries
    yield Checked(
        "npu.cann_python",
        kept or not python.is_dir(),
        f"{python} {'is' if kept else 'is not'} on PYTHONPATH",
        f"`source {script}` again, and keep $PYTHONPATH at the end of your own",
        fatal=True,
    )
    yield _check_operators(host, home)
    yield _check_atb(host)


def _find_script(host: Host) -> str:
    """Return the path of CANN's set_env.sh: the first that exists on the host, else SET_ENV[0].

    Looks at all paths of SET_ENV, then at the same ones below the user's ~/Ascend.
    """
    home = f"{host.environment.get('HOME', '~')}/Ascend"
    own = [name.replace("/usr/local/Ascend", home) for name in SET_ENV]
    return next((name for name in (*SET_ENV, *own) if host.path(name).is_file()), SET_ENV[0])


def _check_operators(host: Host, home: Path) -> Checked:
    kernels = Path(host.environment.get("ASCEND_OPP_PATH") or home / "opp", KERNELS)
    chips = sorted(each.name for each in kernels.iterdir()) if kernels.is_dir() else []
    chips = [name for name in chips if name != "config"]
    return Checked(
        "npu.operators",
        bool(chips),
        f"{kernels}: {', '.join(chips) or 'none'}",
        "install CANN's package of operators for this chip beside the toolkit, of the same "
        "version: Ascend-cann-910b-ops (910B) or Ascend-cann-A3-ops (A3); before 8.5 "
        "Ascend-cann-kernels-<chip>",
    )


def _check_atb(host: Host) -> Checked:
    home = host.environment.get("ATB_HOME_PATH", "")
    installed = host.path(SET_ENV_ATB).is_file()
    return Checked(
        "npu.atb",
        bool(home) and Path(home).is_dir(),
        f"ATB_HOME_PATH={home}" if home else "ATB_HOME_PATH is not set",
        f"`source {SET_ENV_ATB}` after CANN's set_env.sh"
        + ("" if installed else "; install CANN's NNAL first, of the same version"),
    )


def check_links(host: Host, devices: Sequence[int], several_hosts: bool) -> Iterator[Checked]:
    """Yield `npu.links` (is every port's link up?) and `npu.tls` (is the TLS switch equal on all?).

    Without hccn_tool yield only `npu.links`, "not looked at": a warning on several hosts, else it
    passes. Ports of which hccn_tool does not tell the state are an `npu.links` of their own, on
    several hosts a warning. A TLS switch that differs is an error.
    devices:       numbers of the devices, as npu-smi lists them
    several_hosts: a link that is down is an error; on one host it is only shown
    """
    tool = shutil.which("hccn_tool") or HCCN_TOOL
    if host.root == Path("/") and not Path(tool).is_file():
        remedy = f"mount {HCCN_TOOL} and /etc/hccn.conf into the container"
        yield Checked("npu.links", not several_hosts, "no hccn_tool: not looked at", remedy)
        return
    states, switches = {}, set()
    for device in devices:
        states[device] = _first(r"link status:\s*(\w+)", _ask(host, tool, device, "-link"))
        switches.add(_first(r"tls switch\[(\d)\]", _ask(host, tool, device, "-tls")))
    silent = [str(device) for device, state in states.items() if state == UNKNOWN]
    down = [f"{n}: {state}" for n, state in states.items() if state not in ("UP", UNKNOWN)]
    if silent:
        yield Checked(
            "npu.links",
            not several_hosts,
            f"hccn_tool did not tell the state of {', '.join(silent)}",
            f"run it as root, and mount /etc/hccn.conf: `{HCCN_TOOL} -i N -link -g`",
        )
    if down or not silent:
        yield Checked(
            "npu.links",
            not (down and several_hosts),
            f"not up: {', '.join(down)}" if down else f"{len(states)} up",
            f"look at cable, switch and address: `{HCCN_TOOL} -i N -link -g`, `-ip -g`",
            fatal=True,
        )
    switches.discard(UNKNOWN)
    yield Checked(
        "npu.tls",
        len(switches) <= 1,
        f"switch {', '.join(sorted(switches)) or UNKNOWN}",
        f"the same on every device of every host: `{HCCN_TOOL} -i N -tls -s enable 0`",
        fatal=True,
    )


def _ask(host: Host, tool: str, device: int, option: str) -> str:
    try:
        return host.run((tool, "-i", str(device), option, "-g"))
    except ValueError:
        return ""


def _first(pattern: str, text: str) -> str:
    found = re.search(pattern, text)
    return found[1] if found else UNKNOWN


def describe_cards(devices: Sequence[driver.DriverDevice]) -> Checked:
    """Check that all cards have the same number of devices; else a warning.

    The value has the option for `ray start` with the number of devices. On A3 a card has two
    devices, and each is a rank.
    """
    sizes = Counter(each.card for each in devices).values()
    even = len(set(sizes)) <= 1
    dies = "-".join(str(size) for size in sorted({min(sizes, default=0), max(sizes, default=0)}))
    value = f"{len(sizes)} card{'' if len(sizes) == 1 else 's'}, "
    value += f"{dies} device{'' if dies == '1' else 's'} on each"
    return Checked(
        "npu.cards",
        even,
        f"{value}: `--resources='{{\"NPU\": {len(devices)}}}'` ({platform.machine()})",
        "a card with fewer dies than others: give the container both /dev/davinci<N> of a card",
    )


def _folders(host: Host, variable: str) -> list[str]:
    return [name for name in host.environment.get(variable, "").split(os.pathsep) if name]
