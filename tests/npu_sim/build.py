"""Build the simulated device, once for each content of its sources and version of torch."""

import fcntl
import functools
import hashlib
import importlib.util
import os
import shutil
import subprocess
import sysconfig
import tempfile
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from torch.utils import cpp_extension

SOURCES = Path(__file__).resolve().parent / "device"
NAME = "npu_sim_device"
TORCH = "2.13."  # the sources need the headers of this version
CORE = "0.16."  # the small adaptor replaces the MindSpeed of this Megatron-core
TIMEOUT_S = 900
CACHE = "RLXF_NPU_SIM_CACHE"


def missing() -> str:
    """Return why this machine cannot build the device; "" = it can."""
    if not torch.__version__.startswith(TORCH):
        return f"the simulated NPU is written for torch {TORCH}x, not {torch.__version__}"
    if _compiler() is None:
        return "the simulated NPU needs a C++ compiler: install g++, or name one in CXX"
    if not Path(sysconfig.get_path("include"), "Python.h").is_file():
        return "the simulated NPU needs Python.h: install Python's development files"
    core = version("megatron-core")
    if not os.environ.get("RLXF_MINDSPEED") and not core.startswith(CORE):
        return f"the simulated NPU needs megatron-core {CORE}x, not {core}; install the set cpu"
    return ""


def library() -> Path:
    """Return the file of the built device; wait while another process builds it."""
    target = _cache() / _key() / f"{NAME}.so"
    if target.is_file():
        return target
    if reason := missing():
        raise RuntimeError(reason)
    target.parent.mkdir(parents=True, exist_ok=True)
    with open(target.parent / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not target.is_file():
            _build(target)
    return target


@functools.cache
def load() -> Any:
    spec = importlib.util.spec_from_file_location(NAME, library())
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _cache() -> Path:
    if given := os.environ.get(CACHE):
        return Path(given)
    home = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache"))
    return home / "mindspeed_rlxf" / "npu_sim"


def _key() -> str:
    digest = hashlib.sha256()
    for file in (Path(__file__), *sorted(SOURCES.iterdir())):
        digest.update(file.read_bytes())
    for fact in (torch.__version__, sysconfig.get_config_var("SOABI"), str(_compiler())):
        digest.update(str(fact).encode())
    return digest.hexdigest()[:16]


def _compiler() -> str | None:
    return shutil.which(os.environ.get("CXX", "g++"))


def _build(target: Path) -> None:
    includes = [*cpp_extension.include_paths(), sysconfig.get_path("include")]
    flags = ["-O0", "-std=c++20", "-fPIC", f"-DTORCH_EXTENSION_NAME={NAME}", "-w"]
    flags += [f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}"]
    flags += [part for path in includes for part in ("-isystem", path)]
    folders = cpp_extension.library_paths()
    libraries = ["-lc10", "-ltorch_cpu", "-ltorch", "-ltorch_python"]
    with tempfile.TemporaryDirectory(dir=target.parent) as scratch:
        sources = sorted(SOURCES.glob("*.cpp"))
        objects = [Path(scratch, f"{source.stem}.o") for source in sources]
        with ThreadPoolExecutor(2) as pool:
            list(pool.map(lambda pair: _run([*flags, "-c", pair[0], "-o", pair[1]]),
                          zip(sources, objects, strict=True)))  # fmt: skip
        made = Path(scratch, target.name)
        links = [part for folder in folders for part in ("-L", folder)]
        _run(["-shared", *objects, *links, *libraries, "-o", made])
        os.replace(made, target)


def _run(arguments: list[Any]) -> None:
    command = [str(_compiler()), *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S)
    if done.returncode:
        raise RuntimeError(f"the simulated NPU does not build: {done.stderr[-4000:]}")
