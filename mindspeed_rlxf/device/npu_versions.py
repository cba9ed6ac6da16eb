"""Check the installation of an NPU host: fitting versions, driver, CANN, packages, links.

docs/npu.md has every path, package and version with its source. The start of a worker raises what
`check_versions` finds; the doctor shows all. Megatron and MindSpeed are not imported here, because
the order of their imports matters (`device/npu.py`): versions are read from files.
"""

from __future__ import annotations

import os
import platform
import re
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from packaging.requirements import Requirement
from packaging.version import Version

from mindspeed_rlxf.config import packages
from mindspeed_rlxf.device import driver


@dataclass(frozen=True)
class VersionSet:
    """Versions that fit each other: one set of `constraints/`. Tags and branches can move.

    torch:     releases of torch that all other packages are published for
    torch_npu: the release that is published for this CANN
    """

    name: str
    megatron_core: str
    megatron_tag: str  # of github.com/NVIDIA/Megatron-LM
    megatron_commit: str
    mindspeed: str
    mindspeed_branch: str
    mindspeed_commit: str
    torch: tuple[str, ...]
    torch_npu: str
    cann: str
    python: tuple[str, ...] = ("3.10", "3.11")


SETS = (
    VersionSet(
        "npu-core0.12.1",
        "0.12.1", "core_v0.12.1", "a845aa7e12b3a117e24c2352b9e3e60bad2e3a17",
        "0.12.1", "26.1.0_core_r0.12.1", "57a33053c4eccd5b14aa58e3ca595ab414e65b94",
        ("2.7.1",), "2.7.1.post8", "9.1.0",
    ),
    VersionSet(
        "npu-core0.16",
        "0.16.1", "core_v0.16.1", "55ac7082517c3878ae653c07c09c534b8aed49f6",
        "0.16.0", "core_r0.16.0", "e4772499f7eb9fa9a68919dd1eaddef00e915b2d",
        ("2.7.1", "2.9.0"), "2.7.1.post4", "9.0.0",
    ),
)  # fmt: skip
DEFAULT = SETS[0]
# CANN -> its releases of torch_npu (COMPATIBILITY.md of Ascend/pytorch, 2026-08-20; those of 26.1.1
# as in a fork, 2026-11-23). A release pairs with the torch of the same number.
TORCH_NPU_OF_CANN: Mapping[str, tuple[str, ...]] = {
    "8.3": ("2.1.0.post17", "2.6.0.post3", "2.7.1", "2.8.0"),
    "8.5": ("2.6.0.post5", "2.7.1.post2", "2.8.0.post2", "2.9.0"),
    "9.0": ("2.7.1.post4", "2.8.0.post4", "2.9.0.post2", "2.10.0"),
    "9.1": (
        "2.7.1.post8", "2.9.0.post6", "2.10.0.post4", "2.11.0", "2.12.0",
        "2.7.1.post10", "2.9.0.post8", "2.10.0.post6", "2.11.0.post2", "2.12.0.post2",
    ),
}  # fmt: skip
# Python packages that CANN's operators and compilers import, and limits of single releases.
CANN_PYTHON = (
    "numpy>=1.19.2", "decorator>=4.4.0", "sympy>=1.5.1", "cffi>=1.12.3", "attrs", "cython",
    "pyyaml", "pathlib2", "protobuf", "scipy", "requests", "psutil", "absl-py",
)  # fmt: skip
CANN_PYTHON_OF: Mapping[str, tuple[str, ...]] = {
    "8.3": ("numpy<=1.24.0", "protobuf==3.20.*"),
    "8.5": ("numpy<2", "protobuf==3.20.*"),
    "9.0": ("protobuf==3.20.*",),
}
TRITON_INDEX = "https://triton-ascend.osinfra.cn/pypi/simple"
TRITON = "3.2.1"  # the first version that can be installed beside triton
TORCH_INDEX = "https://download.pytorch.org/whl/cpu"
TAGS = " or ".join(each.megatron_tag for each in SETS)
BRANCHES = " or ".join(each.mindspeed_branch for each in SETS)
TORCH_NPU = "torch_npu"
PACKAGES = (
    "torch", TORCH_NPU, packages.MEGATRON, "mindspeed", "ray", "transformers", "tokenizers",
    "safetensors", "numpy", "vllm", "vllm_ascend",
)  # fmt: skip

DRIVER = "/usr/local/Ascend/driver"
DRIVER_VERSION = f"{DRIVER}/version.info"
DEVICE_FILES = ("/dev/davinci_manager", "/dev/devmm_svm", "/dev/hisi_hdc")
CANN_ROOTS = ("/usr/local/Ascend/cann", "/usr/local/Ascend/ascend-toolkit/latest")
CANN_FILES = ("*/ascend_toolkit_install.info", "version.cfg", "*/version.info", "version.info")
CANN_VERSION = re.compile(r"^\W*\w*version\w*\W*?=\W*([0-9]+\.[0-9][\w.]*)", re.I | re.M)
HOME = ("ASCEND_HOME_PATH", "ASCEND_TOOLKIT_HOME")
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
    """The result of one check. fatal: a failure is an error, else a warning"""

    name: str
    fine: bool
    value: str
    remedy: str
    fatal: bool = False


@dataclass(frozen=True)
class Installed:
    """Versions that this process would import; None = not installed, or version unknown."""

    torch: str | None
    torch_npu: str | None
    megatron_core: str | None
    mindspeed: str | None
    cann: str | None


class Host(NamedTuple):
    """The host to inspect. root: the folder that stands for `/`; run: returns a command's output"""

    root: Path = Path("/")
    environment: Mapping[str, str] = os.environ
    run: Callable[[Sequence[str]], str] = driver.run_tool

    def path(self, name: str) -> Path:
        return self.root / name.lstrip("/")

    def folders(self, variable: str) -> list[str]:
        return [name for name in self.environment.get(variable, "").split(os.pathsep) if name]


def read_versions() -> Installed:
    """Return the versions that this process would import, from files; imports none of them."""
    torch, torch_npu, core, mindspeed = map(packages.version, PACKAGES[:4])
    return Installed(torch, torch_npu, core, mindspeed, cann_version())


def cann_version() -> str | None:
    """Return the first version in the files of CANN; None when no file has one."""
    named = [os.environ.get(name) for name in reversed(HOME)]
    for root in (*filter(None, named), *CANN_ROOTS):
        for pattern in CANN_FILES:
            for file in sorted(Path(root).glob(pattern)):
                if found := CANN_VERSION.search(_read_text(file)):
                    return found[1]
    return None


def require_versions() -> list[str]:
    """Return warnings about versions that were not tried together.

    Raises ValueError, with all fatal problems, if the installation cannot work.
    """
    found = check_versions()
    if fatal := [f"{each.value}; {each.remedy}" for each in found if each.fatal]:
        raise ValueError("; ".join(fatal))
    return [f"{each.value}; {each.remedy}" for each in found]


def check_versions() -> list[Checked]:
    """Return the problems with versions, each `versions.pairs`; [] if all fit and were tried."""
    return list(source_problems()) or list(pair_problems(read_versions()))


def _problem(value: str, remedy: str, fatal: bool = True) -> Checked:
    return Checked("versions.pairs", False, value, remedy, fatal)


def source_problems() -> Iterator[Checked]:
    """Yield fatal problems of the packages of Megatron-LM and MindSpeed on the path."""
    core, training = (packages.folder_of(f"megatron.{part}") for part in ("core", "training"))
    if training is None:
        yield _problem(
            "MindSpeed needs the package megatron.training, which the megatron-core wheel lacks"
            f" (megatron.core: {core or 'not found'})",
            f"put a checkout of Megatron-LM, tag {TAGS}, on PYTHONPATH of every node before "
            "`ray start`",
        )
    elif core is None or core.parent != training.parent:
        yield _problem(
            f"megatron.core ({core}) and megatron.training ({training}) must come from one "
            "Megatron-LM checkout",
            "put it first on PYTHONPATH, or uninstall the other",
        )
    mindspeed, remedy = packages.folder_of("mindspeed"), f"check out its branch {BRANCHES}"
    if mindspeed is None:
        yield _problem(
            "device.kind=npu needs MindSpeed, which is not on the path",
            f"put a checkout of its branch {BRANCHES} on PYTHONPATH of every node",
        )
    # Files are read instead of the version: from core_r0.17.0 on MindSpeed is one of three
    # packages, and its setup.py still says 0.12.1.
    elif "import megatron_adaptor" in _read_text(mindspeed / "__init__.py"):
        rule = f"MindSpeed ({mindspeed}) needs MegatronAdaptor and TransformerEngineNPU beside it"
        yield _problem(f"{rule}, as from core_r0.17.0 on, which was not tried", remedy)
    elif "def repatch(" not in _read_text(mindspeed / "megatron_adaptor.py"):
        rule = f"MindSpeed ({mindspeed}) must have mindspeed.megatron_adaptor.repatch"
        yield _problem(f"{rule}, which older ones lack", remedy)


def find_set(megatron_core: str) -> VersionSet | None:
    """Return the set for this megatron-core, compared by minor version; None if SETS has none."""
    wanted = Version(megatron_core).release[:2]
    return next((s for s in SETS if Version(s.megatron_core).release[:2] == wanted), None)


def pair_problems(versions: Installed) -> Iterator[Checked]:
    """Yield a problem for each pair of versions that do not fit, or were not tried together.

    Fatal are torch_npu and torch of different numbers, and MindSpeed and Megatron-LM of different
    minor versions.
    """
    torch, torch_npu, cann = versions.torch, versions.torch_npu, versions.cann
    core, mindspeed = versions.megatron_core, versions.mindspeed
    if torch and torch_npu and Version(torch).release != Version(torch_npu).release:
        yield _problem(
            f"torch_npu {torch_npu} must have the number of torch, which is {Version(torch)}",
            f"pip install torch_npu=={'.'.join(map(str, Version(torch).release))}.*",
        )
    chosen = find_set(core) if core else None
    use_tag = f"use Megatron-LM {TAGS}"
    if core is None:
        rule = "Megatron-LM is on the path without package_info.py or metadata"
        yield _problem(f"{rule}: its version is not known", use_tag, fatal=False)
    elif chosen is None:
        yield _problem(f"Megatron-LM {core} is in no set of constraints/", use_tag, fatal=False)
    elif torch and Version(torch).base_version not in chosen.torch:
        rule = f"torch {torch} is not that of {chosen.name}"
        yield _problem(rule, f"use torch {' or '.join(chosen.torch)}", fatal=False)
    if mindspeed is None:
        rule = "MindSpeed is on the path without setup.py or metadata: its version is not known"
        yield _problem(rule, "use a whole checkout of it", fatal=False)
    elif core and Version(core).release[:2] != Version(mindspeed).release[:2]:
        remedy = f"check out MindSpeed {chosen.mindspeed_branch}" if chosen else use_tag
        yield _problem(f"MindSpeed {mindspeed} must pair with Megatron-LM {core}", remedy)
    wanted = TORCH_NPU_OF_CANN.get(_minor(cann or ""), ())
    if torch_npu and cann and Version(torch_npu).public not in wanted:
        known = ", ".join(TORCH_NPU_OF_CANN)
        yield _problem(
            f"torch_npu {torch_npu} with CANN {cann} is not in torch_npu's own table of pairs",
            f"install torch_npu {' or '.join(wanted)}" if wanted else f"use CANN {known}",
            fatal=False,
        )


def _minor(version: str) -> str:
    return ".".join(version.split(".")[:2])


def _read_text(file: Path) -> str:
    return file.read_text(encoding="utf-8", errors="replace") if file.is_file() else ""


def check_host(host: Host, several_hosts: bool) -> list[Checked]:
    """Return all results of this host but `check_versions`: driver, CANN, Python, links.

    several_hosts: the run uses more than one, which the devices' own network ports connect
    """
    return [
        *check_driver(host),
        *check_cann(host),
        *check_python(read_versions()),
        *check_links(host, several_hosts),
    ]


def check_driver(host: Host) -> Iterator[Checked]:
    """Yield the results for the driver's version, the device files and the firmware."""
    found = re.search(r"^Version=(\S+)", _read_text(host.path(DRIVER_VERSION)), re.M)
    yield Checked(
        "npu.driver",
        found is not None,
        f"{DRIVER_VERSION}: {found[1] if found else 'missing'}",
        f"install the driver on the host, then the firmware; {IN_CONTAINER}",
        fatal=True,
    )
    devices = _devices(host)
    missing = [name for name in DEVICE_FILES if not host.path(name).exists()]
    missing += [] if devices else ["/dev/davinci<N>"]
    yield Checked(
        "npu.device_files",
        not missing,
        f"missing: {', '.join(missing)}" if missing else f"{len(devices)} of /dev/davinci<N>",
        f"look at the driver's log on the host; {IN_CONTAINER}",
        fatal=True,
    )
    facts = dict(re.findall(r"^\s*([A-Z][\w ]*?)\s*:\s*(\S.*?)\s*$", _ask(host, *BOARD, "0"), re.M))
    version, fits = (facts.get(name, UNKNOWN) for name in ("Firmware Version", "Compatibility"))
    yield Checked(
        "npu.firmware",
        fits != "NOK",
        f"{version}, compatibility with the driver {fits} (card 0)",
        "install the firmware that the driver's release names",
        fatal=True,
    )


def _devices(host: Host) -> list[int]:
    folder = host.path("/dev")
    names = driver.list_device_files(folder) if folder.is_dir() else []
    return sorted(int(name[7:]) for name in names if name.startswith("davinci"))


def _ask(host: Host, *command: str) -> str:
    try:
        return host.run(command)
    except ValueError:
        return ""


def check_cann(host: Host) -> Iterator[Checked]:
    """Yield the results for CANN's environment, its Python folder, its operators and ATB.

    The environment passes if the variables of HOME name one folder, links followed; if they name
    none, only this result is yielded.
    """
    homes = {name: host.environment[name] for name in HOME if host.environment.get(name)}
    user = f"{host.environment.get('HOME', '~')}/Ascend"  # where one who is not root installs
    own = [name.replace("/usr/local/Ascend", user) for name in SET_ENV]
    scripts = [name for name in (*SET_ENV, *own) if host.path(name).is_file()]
    script = scripts[0] if scripts else SET_ENV[0]
    shown = ", ".join(f"{name}={home}" for name, home in homes.items())
    yield Checked(
        "npu.set_env",
        len({Path(home).resolve() for home in homes.values()}) == 1,
        shown or f"neither {' nor '.join(HOME)} is set",
        f"`source {script}` alone, in a new shell, before `ray start` and the run",
        fatal=True,
    )
    if not homes:
        return
    home = Path(next(iter(homes.values())))
    python = home / "python" / "site-packages"
    kept = python.resolve() in {Path(folder).resolve() for folder in host.folders("PYTHONPATH")}
    yield Checked(
        "npu.cann_python",
        kept or not python.is_dir(),
        f"{python} {'is' if kept else 'is not'} on PYTHONPATH",
        f"`source {script}` again, and keep $PYTHONPATH at the end of your own",
        fatal=True,
    )
    kernels = Path(host.environment.get("ASCEND_OPP_PATH") or home / "opp", KERNELS)
    chips = {each.name for each in kernels.iterdir()} if kernels.is_dir() else set()
    chips -= {"config"}
    yield Checked(
        "npu.operators",
        bool(chips),
        f"{kernels}: {', '.join(sorted(chips)) or 'none'}",
        "install CANN's package of operators for this chip beside the toolkit, of the same "
        "version: Ascend-cann-910b-ops (910B) or Ascend-cann-A3-ops (A3); before 8.5 "
        "Ascend-cann-kernels-<chip>",
    )
    atb = host.environment.get("ATB_HOME_PATH", "")
    installed = host.path(SET_ENV_ATB).is_file()
    yield Checked(
        "npu.atb",
        bool(atb) and Path(atb).is_dir(),
        f"ATB_HOME_PATH={atb}" if atb else "ATB_HOME_PATH is not set",
        f"`source {SET_ENV_ATB}` after CANN's set_env.sh"
        + ("" if installed else "; install CANN's NNAL first, of the same version"),
    )


def check_python(versions: Installed) -> Iterator[Checked]:
    """Yield the results for Python, the build of torch, and the packages of CANN and MindSpeed.

    Python is compared with the set for the installed Megatron, else with DEFAULT. triton-ascend is
    checked only for core 0.16, whose MindSpeed imports it when it starts.
    """
    chosen = (find_set(versions.megatron_core) if versions.megatron_core else None) or DEFAULT
    here = "{}.{}".format(*sys.version_info[:2])
    yield Checked(
        "npu.python",
        here in chosen.python,
        f"{here}; {chosen.name} was tested with {' and '.join(chosen.python)}",
        f"make the environment with Python {chosen.python[-1]}",
    )
    torch, x86 = versions.torch or "", platform.machine() == "x86_64"
    build = torch.partition("+")[2]
    number = Version(torch).base_version if torch else DEFAULT.torch[0]
    yield Checked(
        "npu.torch_build",
        bool(torch) and (build == "cpu" if x86 else not build.startswith("cu")),
        f"torch {versions.torch} on {platform.machine()}",
        f"pip install torch=={number}{'+cpu' if x86 else ''} --index-url {TORCH_INDEX}",
    )
    cann = _minor(versions.cann or DEFAULT.cann)
    wanted = [Requirement(text) for text in (*CANN_PYTHON, *CANN_PYTHON_OF.get(cann, ()))]
    found = {each.name: packages.version(each.name) for each in wanted}
    missing = [name for name, version in found.items() if version is None]
    yield Checked(
        "npu.cann_packages",
        not missing,
        f"missing: {', '.join(missing)}" if missing else f"all {len(found)} that CANN imports",
        f"pip install {' '.join(missing)}",
        fatal=True,
    )
    wrong = [
        f"{each.name} {version}, not {each.specifier}"
        for each in wanted
        if (version := found[each.name]) and not each.specifier.contains(version, True)
    ]
    yield Checked(
        "npu.cann_ranges",
        not wrong,
        f"CANN {cann}: {'; '.join(wrong) or 'within the ranges of its guide'}",
        f"use CANN {DEFAULT.cann}, which takes the versions of constraints/",
    )
    if chosen is SETS[1]:
        ascend, stock = packages.version("triton-ascend"), packages.version("triton")
        install = f"pip install triton-ascend=={TRITON} --extra-index-url={TRITON_INDEX}"
        yield Checked(
            "npu.triton",
            bool(ascend) and (stock is None or Version(str(ascend)) >= Version(TRITON)),
            f"triton-ascend {ascend or 'not installed'}, triton {stock or 'not installed'}",
            f"pip uninstall -y triton triton-ascend; {install}" if ascend else install,
            fatal=True,
        )
    if (engine := packages.folder_of("transformer_engine")) is not None:
        remedy = "pip uninstall transformer_engine: MindSpeed imports it, and it asks for CUDA"
        yield Checked("npu.transformer_engine", False, str(engine), remedy)


def check_links(host: Host, several_hosts: bool) -> Iterator[Checked]:
    """Yield `npu.links` (is every port's link up?) and `npu.tls` (is the TLS switch equal on all?).

    Links matter between hosts only. A state that hccn_tool does not tell is a warning there.
    """
    tool, states, switches = shutil.which("hccn_tool") or HCCN_TOOL, {}, set()
    for device in _devices(host):
        link, tls = (_ask(host, tool, "-i", f"{device}", what, "-g") for what in ("-link", "-tls"))
        state = re.search(r"link status:\s*(\w+)", link)
        states[device] = state[1] if state else UNKNOWN
        switches.update(re.findall(r"tls switch\[(\d)\]", tls))
    bad = {device: state for device, state in states.items() if state != "UP"}
    yield Checked(
        "npu.links",
        not (bad and several_hosts),
        ", ".join(f"{n}: {state}" for n, state in bad.items()) or f"{len(states)} up",
        f"look at cable, switch and address: `{HCCN_TOOL} -i N -link -g`, `-ip -g` as root; in a "
        "container mount hccn_tool and /etc/hccn.conf",
        fatal=bool(set(bad.values()) - {UNKNOWN}),
    )
    yield Checked(
        "npu.tls",
        len(switches) <= 1,
        f"switch {', '.join(sorted(switches)) or UNKNOWN}",
        f"the same on every device of every host: `{HCCN_TOOL} -i N -tls -s enable 0`",
        fatal=True,
    )
