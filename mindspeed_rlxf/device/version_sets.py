"""Which versions pair on NPU, as data. Everything else is a range in `setup.py`."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path

from packaging.version import Version

from mindspeed_rlxf.config.enums import DeviceKind

# CANN -> releases of torch_npu made for it (its own table of releases); a release of torch_npu
# pairs with the torch of the same number, whatever its `.post`.
TORCH_NPU_OF_CANN: Mapping[str, tuple[str, ...]] = {
    "8.5": ("2.6.0.post5", "2.7.1.post2", "2.8.0.post2", "2.9.0"),
    "9.0": ("2.7.1.post4", "2.8.0.post4", "2.9.0.post2", "2.10.0"),
    "9.1": (
        "2.7.1.post8", "2.9.0.post6", "2.10.0.post4", "2.11.0", "2.12.0",
        "2.7.1.post10", "2.9.0.post8", "2.10.0.post6", "2.11.0.post2", "2.12.0.post2",
    ),
}  # fmt: skip
PACKAGES = (
    "torch", "torch_npu", "megatron-core", "mindspeed", "ray", "transformers", "tokenizers",
    "safetensors", "numpy", "vllm", "vllm_ascend",
)  # fmt: skip
REQUIRED = {
    DeviceKind.CPU: ("torch", "megatron-core", "ray", "transformers", "safetensors", "numpy"),
    DeviceKind.CUDA: ("torch", "megatron-core", "ray", "transformers", "safetensors", "numpy"),
    DeviceKind.NPU: ("torch", "torch_npu", "mindspeed", "ray", "transformers", "numpy"),
}
CANN_ROOTS = ("/usr/local/Ascend/ascend-toolkit/latest", "/usr/local/Ascend/cann")
CANN_FILES = ("*/ascend_toolkit_install.info", "version.cfg", "*/version.info", "version.info")
CANN_VERSION = re.compile(r"^\W*\w*version\w*\W*?=\W*([0-9]+\.[0-9][\w.]*)", re.I | re.M)


def installed() -> dict[str, str | None]:
    """Distribution -> version, None where it is not installed."""
    return {name: _version(name) for name in PACKAGES}


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def cann_version(environment: Mapping[str, str] | None = None) -> str | None:
    """Of the CANN whose set_env.sh was sourced, else of the usual folder."""
    environment = os.environ if environment is None else environment
    named = [environment.get(name) for name in ("ASCEND_TOOLKIT_HOME", "ASCEND_HOME_PATH")]
    for root in (*filter(None, named), *CANN_ROOTS):
        for pattern in CANN_FILES:
            for file in sorted(Path(root).glob(pattern)):
                text = file.read_text(encoding="utf-8", errors="replace")
                if found := CANN_VERSION.search(text):
                    return found[1]
    return None


def mispairings(versions: Mapping[str, str | None], cann: str | None) -> Iterator[tuple[str, str]]:
    """(what does not go together, remedy) of an NPU installation."""
    torch, npu = versions.get("torch"), versions.get("torch_npu")
    if torch and npu and Version(torch).release != Version(npu).release:
        numbers = ".".join(map(str, Version(torch).release))
        yield f"torch {torch} with torch_npu {npu}", f"pip install torch_npu=={numbers}.*"
    if npu and cann:
        release = ".".join(cann.split(".")[:2])
        wanted = TORCH_NPU_OF_CANN.get(release, ())
        if wanted and Version(npu).public not in wanted:
            yield f"torch_npu {npu} with CANN {cann}", f"install one of {', '.join(wanted)}"
        if not wanted:
            known = ", ".join(TORCH_NPU_OF_CANN)
            yield f"CANN {cann}, whose torch_npu is not in our table", f"known: {known}"
    if versions.get("mindspeed") and find_spec("megatron") and not _has_training():
        remedy = "put a Megatron-LM checkout of the matching tag on PYTHONPATH before the wheel"
        yield "MindSpeed without megatron.training, which the wheel lacks", remedy


def _has_training() -> bool:
    try:
        return find_spec("megatron.training") is not None
    except (ImportError, ValueError):
        return False
