"""Which versions pair on NPU, as data. Everything else is a range in `setup.py`."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path

from mindspeed_rlxf import packages
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
    "torch", "torch_npu", packages.MEGATRON, "mindspeed", "ray", "transformers", "tokenizers",
    "safetensors", "numpy", "vllm", "vllm_ascend",
)  # fmt: skip
REQUIRED = {
    DeviceKind.CPU: ("torch", "megatron-core", "ray", "transformers", "safetensors", "numpy"),
    DeviceKind.CUDA: ("torch", "megatron-core", "ray", "transformers", "safetensors", "numpy"),
    DeviceKind.NPU: ("torch", "torch_npu", "ray", "transformers", "safetensors", "numpy"),
}
CANN_ROOTS = ("/usr/local/Ascend/ascend-toolkit/latest", "/usr/local/Ascend/cann")
CANN_FILES = ("*/ascend_toolkit_install.info", "version.cfg", "*/version.info", "version.info")
CANN_VERSION = re.compile(r"^\W*\w*version\w*\W*?=\W*([0-9]+\.[0-9][\w.]*)", re.I | re.M)


def installed() -> dict[str, str | None]:
    """Distribution -> version of what would be imported, None where there is none."""
    return {name: packages.version(name) for name in PACKAGES}


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
