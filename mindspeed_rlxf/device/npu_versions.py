"""Check an NPU host's installation: compatible versions, driver, CANN, packages.

docs/npu.md has every path, package and version with its source. A starting worker raises what
`find_problems` finds; the doctor shows all. Megatron and MindSpeed are not imported here, because
their import order matters (`device/npu.py`): versions are read from files.
"""

import os
import platform
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from packaging.requirements import Requirement
from packaging.version import Version

from mindspeed_rlxf.config import packages
from mindspeed_rlxf.device.findings import Finding, Status, error, judge, warning


@dataclass(frozen=True)
class VersionSet:
    """Compatible versions: one set in `constraints/`.

    `torch` has the releases all other packages are published for, `torch_npu` this CANN's release.
    """

    name: str
    megatron_core: str
    megatron_tag: str  # of github.com/NVIDIA/Megatron-LM; docs/npu.md has the commits
    mindspeed: str
    mindspeed_branch: str
    torch: tuple[str, ...]
    torch_npu: str
    cann: str
    python: tuple[str, ...] = ("3.10", "3.11")


SETS = (
    VersionSet(
        "npu-core0.12.1",
        "0.12.1", "core_v0.12.1", "0.12.1", "26.1.0_core_r0.12.1",
        ("2.7.1",), "2.7.1.post8", "9.1.0",
    ),
    VersionSet(
        "npu-core0.16",
        "0.16.1", "core_v0.16.1", "0.16.0", "core_r0.16.0",
        ("2.7.1", "2.9.0"), "2.7.1.post4", "9.0.0",
    ),
    VersionSet(
        "npu-vllm",
        "0.16.1", "core_v0.16.1", "0.16.0", "core_r0.16.0",
        ("2.10.0",), "2.10.0.post4", "9.1.0",
    ),
)  # fmt: skip
DEFAULT = SETS[0]
VLLM = "0.23"  # vllm and vllm-ascend of the set npu-vllm


class Cann(NamedTuple):
    """Compatible versions for one minor CANN version: torch_npu, limits for Python packages.

    The releases are from COMPATIBILITY.md in Ascend/pytorch, 2026-08-20 (those for 26.1.1 from a
    fork, 2026-11-23), each for the torch with the same number.
    """

    torch_npu: tuple[str, ...]
    python: tuple[str, ...] = ()


CANNS: Mapping[str, Cann] = {
    "8.3": Cann(
        ("2.1.0.post17", "2.6.0.post3", "2.7.1", "2.8.0"), ("numpy<=1.24.0", "protobuf==3.20.*")
    ),
    "8.5": Cann(
        ("2.6.0.post5", "2.7.1.post2", "2.8.0.post2", "2.9.0"), ("numpy<2", "protobuf==3.20.*")
    ),
    "9.0": Cann(("2.7.1.post4", "2.8.0.post4", "2.9.0.post2", "2.10.0"), ("protobuf==3.20.*",)),
    "9.1": Cann((
        "2.7.1.post8", "2.9.0.post6", "2.10.0.post4", "2.11.0", "2.12.0",
        "2.7.1.post10", "2.9.0.post8", "2.10.0.post6", "2.11.0.post2", "2.12.0.post2",
    )),
}  # fmt: skip
# Python packages that CANN's operators and compilers import.
CANN_PYTHON = (
    "numpy>=1.19.2", "decorator>=4.4.0", "sympy>=1.5.1", "cffi>=1.12.3", "attrs", "cython",
    "pyyaml", "pathlib2", "protobuf", "scipy", "requests", "psutil", "absl-py",
)  # fmt: skip
TRITON_INDEX = "https://triton-ascend.osinfra.cn/pypi/simple"
TRITON = "3.2.1"  # the first version that can be installed beside triton
TORCH_INDEX = "https://download.pytorch.org/whl/cpu"
TAGS = " or ".join(versions.megatron_tag for versions in SETS)
BRANCHES = " or ".join(versions.mindspeed_branch for versions in SETS)
TORCH_NPU = "torch_npu"
PAIRS = "versions.pairs"
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
IN_CONTAINER = (
    "in a container: --device /dev/davinci0 (one for each) "
    f"{' '.join(f'--device {name}' for name in DEVICE_FILES)} -v {DRIVER}:{DRIVER}"
)


class Installed(NamedTuple):
    """Versions this process would import; None = not installed, or version unknown."""

    torch: str | None
    torch_npu: str | None
    megatron_core: str | None
    mindspeed: str | None
    cann: str | None
    vllm: str | None = None
    vllm_ascend: str | None = None


class Host(NamedTuple):
    """The host to inspect. root: the folder standing for `/`."""

    root: Path = Path("/")
    environment: Mapping[str, str] = os.environ

    def path(self, name: str) -> Path:
        """Return an absolute path below `root`."""
        return self.root / name.lstrip("/")


def read_versions() -> Installed:
    """Return the versions this process would import, from files; imports none."""
    torch, torch_npu, core, mindspeed = map(packages.version, PACKAGES[:4])
    vllm, vllm_ascend = map(packages.version, PACKAGES[-2:])
    return Installed(torch, torch_npu, core, mindspeed, cann_version(), vllm, vllm_ascend)


def cann_version() -> str | None:
    """Return the first version in CANN's files; None if there is none."""
    homes = [os.environ.get(name) for name in reversed(HOME)]
    for root in (*filter(None, homes), *CANN_ROOTS):
        for pattern in CANN_FILES:
            for file in sorted(Path(root).glob(pattern)):
                match = CANN_VERSION.search(_read_text(file))
                if match:
                    return match[1]
    return None


def require_versions() -> list[str]:
    """Return warnings about versions; raise ValueError listing all errors if there are any."""
    errors: list[str] = []
    warnings: list[str] = []
    for finding in find_problems():
        texts = errors if finding.status is Status.ERROR else warnings
        texts.append(f"{finding.value}; {finding.remedy}")
    if errors:
        raise ValueError("; ".join(errors))
    return warnings


def find_problems() -> list[Finding]:
    """Return version problems, each `versions.pairs`; [] if all are compatible and tested."""
    return list(source_problems()) or list(pair_problems(read_versions()))


def source_problems() -> Iterator[Finding]:
    """Yield errors about the Megatron-LM and MindSpeed packages on the path."""
    core = packages.folder_of("megatron.core")
    training = packages.folder_of("megatron.training")
    if training is None:
        yield error(
            PAIRS,
            "MindSpeed needs the package megatron.training, which the megatron-core wheel lacks"
            f" (megatron.core: {core or 'not found'})",
            f"put a checkout of Megatron-LM, tag {TAGS}, on PYTHONPATH of every node before "
            "`ray start`",
        )
    elif core is None or core.parent != training.parent:
        yield error(
            PAIRS,
            f"megatron.core ({core}) and megatron.training ({training}) must come from one "
            "Megatron-LM checkout",
            "put it first on PYTHONPATH, or uninstall the other",
        )
    # Files are read instead of the version: from core_r0.17.0 on MindSpeed is one of three
    # packages, and its setup.py still says 0.12.1.
    mindspeed = packages.folder_of("mindspeed")
    if mindspeed is None:
        rule = "device.kind=npu needs MindSpeed, which is not on the path"
    elif "import megatron_adaptor" in _read_text(mindspeed / "__init__.py"):
        rule = f"MindSpeed ({mindspeed}) needs MegatronAdaptor and TransformerEngineNPU beside it"
    elif "def repatch(" not in _read_text(mindspeed / "megatron_adaptor.py"):
        rule = f"MindSpeed ({mindspeed}) must have mindspeed.megatron_adaptor.repatch"
    else:
        return
    remedy = f"put a checkout of its branch {BRANCHES} on PYTHONPATH of every node"
    yield error(PAIRS, rule, remedy)


def find_set(megatron_core: str, torch: str | None = None) -> VersionSet | None:
    """Return the set for this megatron-core, compared by minor version; None if SETS has none.

    Of several, that with this torch, else the first.
    """
    minor_version = Version(megatron_core).release[:2]
    matches = [s for s in SETS if Version(s.megatron_core).release[:2] == minor_version]
    if not matches:
        return None
    torch_version = Version(torch).base_version if torch else ""
    return next((s for s in matches if torch_version in s.torch), matches[0])


def pair_problems(versions: Installed) -> Iterator[Finding]:
    """Yield a problem for each incompatible or untested version pair."""
    torch, torch_npu, core, mindspeed, cann, *servers = versions
    if torch and torch_npu and Version(torch).release != Version(torch_npu).release:
        yield error(
            PAIRS,
            f"torch_npu {torch_npu} must have the number of torch, which is {Version(torch)}",
            f"pip install torch_npu=={'.'.join(map(str, Version(torch).release))}.*",
        )
    chosen = find_set(core, torch) if core else None
    use_tag = f"use a whole checkout of Megatron-LM {TAGS}"
    if chosen is None:
        subject = f"Megatron-LM {core}" if core else "Megatron-LM, whose version is not known,"
        yield warning(PAIRS, f"{subject} is in no set of constraints/", use_tag)
    elif torch and Version(torch).base_version not in chosen.torch:
        rule = f"torch {torch} is not that of {chosen.name}"
        yield warning(PAIRS, rule, f"use torch {' or '.join(chosen.torch)}")
    for name, version in zip(("vllm", "vllm_ascend"), servers, strict=True):
        if version and servers[1] and _minor(version) != VLLM:
            rule = f"{name} {version} is not that of {SETS[2].name}"
            yield warning(
                PAIRS, rule, f"use vllm and vllm-ascend {VLLM}, with torch {SETS[2].torch[0]}"
            )
    if mindspeed is None:
        rule = "MindSpeed is on the path without setup.py or metadata: its version is not known"
        yield warning(PAIRS, rule, "use a whole checkout of it")
    elif core and Version(core).release[:2] != Version(mindspeed).release[:2]:
        remedy = f"check out MindSpeed {chosen.mindspeed_branch}" if chosen else use_tag
        yield error(PAIRS, f"MindSpeed {mindspeed} must pair with Megatron-LM {core}", remedy)
    compatible = CANNS.get(_minor(cann or ""), Cann(())).torch_npu
    if torch_npu and cann and Version(torch_npu).public not in compatible:
        rule = f"torch_npu {torch_npu} with CANN {cann} is not in torch_npu's own table of pairs"
        remedy = f"use CANN {', '.join(CANNS)}"
        if compatible:
            remedy = f"install torch_npu {' or '.join(compatible)}"
        yield warning(PAIRS, rule, remedy)


def _minor(version: str) -> str:
    return ".".join(version.split(".")[:2])


def _read_text(file: Path) -> str:
    return file.read_text(encoding="utf-8", errors="replace") if file.is_file() else ""


def check_driver(host: Host) -> Iterator[Finding]:
    """Yield results for driver version and device files."""
    match = re.search(r"^Version=(\S+)", _read_text(host.path(DRIVER_VERSION)), re.M)
    yield judge(
        match is not None,
        "npu.driver",
        f"{DRIVER_VERSION}: {match[1] if match else 'missing'}",
        f"install the driver on the host, then the firmware; {IN_CONTAINER}",
        Status.ERROR,
    )
    missing = [name for name in DEVICE_FILES if not host.path(name).exists()]
    devices = list(host.path("/dev").glob("davinci[0-9]*"))
    if not devices:
        missing.append("/dev/davinci<N>")
    yield judge(
        not missing,
        "npu.device_files",
        f"missing: {', '.join(missing)}" if missing else f"{len(devices)} /dev/davinci<N>",
        f"look at the driver's log on the host; {IN_CONTAINER}",
        Status.ERROR,
    )


def check_cann(host: Host) -> Iterator[Finding]:
    """Yield results for CANN's environment, Python folder, operators and ATB.

    The environment passes if the HOME variables name one folder, links followed.
    """
    environment = host.environment
    homes = {name: environment[name] for name in HOME if environment.get(name)}
    user = f"{environment.get('HOME', '~')}/Ascend"  # where one who is not root installs
    user_scripts = [name.replace("/usr/local/Ascend", user) for name in SET_ENV]
    scripts = [*SET_ENV, *user_scripts]
    script = next((name for name in scripts if host.path(name).is_file()), SET_ENV[0])
    yield judge(
        len({Path(home).resolve() for home in homes.values()}) == 1,
        "npu.set_env",
        ", ".join(f"{n}={h}" for n, h in homes.items()) or f"neither {' nor '.join(HOME)} is set",
        f"`source {script}` alone, in a new shell, before `ray start` and the run",
        Status.ERROR,
    )
    if not homes:
        return
    home = Path(next(iter(homes.values())))
    python = home / "python" / "site-packages"
    folders = environment.get("PYTHONPATH", "").split(os.pathsep)
    is_on_path = python.resolve() in [Path(name).resolve() for name in folders if name]
    yield judge(
        is_on_path or not python.is_dir(),
        "npu.cann_python",
        f"{python} {'is' if is_on_path else 'is not'} on PYTHONPATH",
        f"`source {script}` again, and keep $PYTHONPATH at the end of your own",
        Status.ERROR,
    )
    kernels = Path(environment.get("ASCEND_OPP_PATH") or home / "opp", KERNELS)
    chips = {folder.name for folder in kernels.glob("*")} - {"config"}
    yield judge(
        bool(chips),
        "npu.operators",
        f"{kernels}: {', '.join(sorted(chips)) or 'none'}",
        "install CANN's package of operators for this chip beside the toolkit, of the same "
        "version: Ascend-cann-910b-ops (910B) or Ascend-cann-A3-ops (A3); before 8.5 "
        "Ascend-cann-kernels-<chip>",
    )
    atb = environment.get("ATB_HOME_PATH", "")
    remedy = f"`source {SET_ENV_ATB}` after CANN's set_env.sh"
    if not host.path(SET_ENV_ATB).is_file():
        remedy += "; install CANN's NNAL first, of the same version"
    yield judge(
        bool(atb) and Path(atb).is_dir(),
        "npu.atb",
        f"ATB_HOME_PATH={atb}" if atb else "ATB_HOME_PATH is not set",
        remedy,
    )


def check_python(versions: Installed) -> Iterator[Finding]:
    """Yield results for Python, the torch build, and packages for CANN and MindSpeed.

    triton-ascend is checked only for core 0.16, whose MindSpeed imports it at startup.
    """
    chosen = None
    if versions.megatron_core:
        chosen = find_set(versions.megatron_core, versions.torch)
    chosen = chosen or DEFAULT
    python = _minor(platform.python_version())
    yield judge(
        python in chosen.python,
        "npu.python",
        f"{python}; {chosen.name} was tested with {' and '.join(chosen.python)}",
        f"make the environment with Python {chosen.python[-1]}",
    )
    is_x86 = platform.machine() == "x86_64"
    number, _, build = (versions.torch or DEFAULT.torch[0]).partition("+")
    is_for_npu = build == "cpu" if is_x86 else not build.startswith("cu")
    yield judge(
        bool(versions.torch) and is_for_npu,
        "npu.torch_build",
        f"torch {versions.torch} on {platform.machine()}",
        f"pip install torch=={number}{'+cpu' if is_x86 else ''} --index-url {TORCH_INDEX}",
    )
    cann = _minor(versions.cann or DEFAULT.cann)
    limits = CANNS[cann].python if cann in CANNS else ()
    missing = []
    wrong = []
    for line in (*CANN_PYTHON, *limits):
        requirement = Requirement(line)
        version = packages.version(requirement.name)
        if version is None:
            if requirement.name not in missing:
                missing.append(requirement.name)
        elif not requirement.specifier.contains(version, True):
            wrong.append(f"{requirement.name} {version}, not {requirement.specifier}")
    yield judge(
        not missing,
        "npu.cann_packages",
        f"missing: {', '.join(missing)}" if missing else "all that CANN imports",
        f"pip install {' '.join(missing)}",
        Status.ERROR,
    )
    yield judge(
        not wrong,
        "npu.cann_ranges",
        f"CANN {cann}: {'; '.join(wrong) or 'within the ranges of its guide'}",
        f"use CANN {DEFAULT.cann}, which takes the versions of constraints/",
    )
    if chosen in SETS[1:]:
        ascend = packages.version("triton-ascend")
        stock = packages.version("triton")
        install = f"pip install triton-ascend=={TRITON} --extra-index-url={TRITON_INDEX}"
        yield judge(
            bool(ascend) and (stock is None or Version(str(ascend)) >= Version(TRITON)),
            "npu.triton",
            f"triton-ascend {ascend or 'not installed'}, triton {stock or 'not installed'}",
            f"pip uninstall -y triton triton-ascend; {install}" if ascend else install,
            Status.ERROR,
        )
    engine = packages.folder_of("transformer_engine")
    if engine is not None:
        remedy = "pip uninstall transformer_engine: MindSpeed imports it, and it asks for CUDA"
        yield warning("npu.transformer_engine", str(engine), remedy)
