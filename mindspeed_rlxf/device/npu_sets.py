"""Sets of versions for NPU, releases of torch_npu, and untried versions, each with its source."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple


class Source(NamedTuple):
    """The source of a fact, and the date of the text that was read."""

    text: str
    date: str


NOTES = Source("MindSpeed, branch 26.1.0_core_r0.12.1: docs/zh/release_notes_core.md", "2026-07-20")
README_16 = Source("MindSpeed, branch core_r0.16.0: README.md", "2026-07-10")
TABLE = Source("Ascend/pytorch: COMPATIBILITY.en.md", "2026-08-20")
FORK = Source("COMPATIBILITY.md of Ascend/pytorch, as in gitcode.com/wzyly/pytorch", "2026-11-23")
INDEX = Source("pypi.org/project/torch-npu", "2026-10-15")


@dataclass(frozen=True)
class VersionSet:
    """Versions that fit each other: one set of `constraints/`.

    torch:     releases of torch that all other packages are published for
    torch_npu: the release that `source` names for this CANN
    """

    name: str
    megatron_core: str
    megatron_tag: str  # of github.com/NVIDIA/Megatron-LM
    megatron_commit: str  # commit of the tag, because a tag can be moved
    mindspeed: str
    mindspeed_branch: str
    mindspeed_commit: str  # commit of the branch, because a branch changes
    torch: tuple[str, ...]
    torch_npu: str
    cann: str
    python: tuple[str, ...]
    source: Source


SETS = (
    VersionSet(
        "npu-core0.12.1",
        "0.12.1", "core_v0.12.1", "a845aa7e12b3a117e24c2352b9e3e60bad2e3a17",
        "0.12.1", "26.1.0_core_r0.12.1", "57a33053c4eccd5b14aa58e3ca595ab414e65b94",
        ("2.7.1",), "2.7.1.post8", "9.1.0", ("3.10", "3.11"), NOTES,
    ),
    VersionSet(
        "npu-core0.16",
        "0.16.1", "core_v0.16.1", "55ac7082517c3878ae653c07c09c534b8aed49f6",
        "0.16.0", "core_r0.16.0", "e4772499f7eb9fa9a68919dd1eaddef00e915b2d",
        ("2.7.1", "2.9.0"), "2.7.1.post4", "9.0.0", ("3.10", "3.11"), README_16,
    ),
)  # fmt: skip
DEFAULT = SETS[0]


class Release(NamedTuple):
    """A release of TorchNPU. cann: major.minor; packages: versions of torch_npu, one per torch"""

    name: str
    cann: str
    packages: tuple[str, ...]
    source: Source


# A package pairs with the torch of the same number, whatever its `.post`.
RELEASES = (
    Release("7.2.0", "8.3", ("2.1.0.post17", "2.6.0.post3", "2.7.1", "2.8.0"), TABLE),
    Release("7.3.0", "8.5", ("2.6.0.post5", "2.7.1.post2", "2.8.0.post2", "2.9.0"), TABLE),
    Release("26.0.0", "9.0", ("2.7.1.post4", "2.8.0.post4", "2.9.0.post2", "2.10.0"), TABLE),
    Release(
        "26.1.0", "9.1",
        ("2.7.1.post8", "2.9.0.post6", "2.10.0.post4", "2.11.0", "2.12.0"), TABLE,
    ),
    Release(
        "26.1.1", "9.1",
        ("2.7.1.post10", "2.9.0.post8", "2.10.0.post6", "2.11.0.post2", "2.12.0.post2"),
        FORK,
    ),
)  # fmt: skip
TORCH_NPU_OF_CANN: Mapping[str, tuple[str, ...]] = {
    cann: tuple(name for each in RELEASES if each.cann == cann for name in each.packages)
    for cann in dict.fromkeys(each.cann for each in RELEASES)
}
# On the package index, but in no table that was read: their CANN is unknown.
UNPAIRED = (
    "2.7.1.post11", "2.8.0.post5", "2.9.0.post9", "2.10.0.post7", "2.11.0.post3", "2.12.0.post3",
    "2.13.0", "2.14.0",
)  # fmt: skip


class NotTried(NamedTuple):
    """Versions that exist and were not tried. obstacle: the reason"""

    what: str
    obstacle: str
    source: Source


SPLIT = Source("MindSpeed, branch core_r0.18.0: README.md, mindspeed/__init__.py", "2026-07-17")
NOT_TRIED = (
    NotTried(
        "MindSpeed `core_r0.17.0` (`1f5feb86`) with Megatron-LM `core_v0.17.1`",
        "`import mindspeed` imports MegatronAdaptor, which is published at gitcode.com alone, as "
        "is TransformerEngineNPU: neither could be read. The latest megatron-core here is 0.16.1",
        Source("MindSpeed, branch core_r0.17.0: README.md", "2026-07-06"),
    ),
    NotTried(
        "MindSpeed `core_r0.18.0` (`4213c913`) with Megatron-LM `core_v0.18.2`; MindSpeed 26.2",
        "the same; and megatron-core 0.17 and newer ask for Python 3.12, "
        "MindSpeed's READMEs for 3.10",
        SPLIT,
    ),
    NotTried(
        f"torch_npu {', '.join(UNPAIRED)}",
        "no table that was read names their CANN, and MindSpeed's notes stop at 26.1.0. The names "
        "that are used here are in 2.7.1.post11, 2.9.0.post9, 2.13.0 and 2.14.0",
        INDEX,
    ),
)

# Python packages that CANN's operators and compilers import, and further ones of single releases.
CANN_PYTHON = (
    "numpy>=1.19.2", "decorator>=4.4.0", "sympy>=1.5.1", "cffi>=1.12.3", "attrs", "cython",
    "pyyaml", "pathlib2", "protobuf", "scipy", "requests", "psutil", "absl-py",
)  # fmt: skip
CANN_PYTHON_OF: Mapping[str, tuple[str, ...]] = {
    "8.3": ("numpy<=1.24.0", "protobuf==3.20.*"),
    "8.5": ("numpy<2", "protobuf==3.20.*"),
    "9.0": ("protobuf==3.20.*",),
    "9.1": (),
}
CANN_PYTHON_SOURCE = Source("hiascend.com, CANN software installation: instg_0045", "2026-11-23")

# Versions with which the tests or the rehearsal passed. MindSpeed's requirements name others of
# these packages (numpy 1.26.0, transformers 5.23.0).
TESTED: Mapping[str, tuple[str, ...]] = {
    "numpy": ("2.4.6", "2.2.6", "1.26.0"),
    "transformers": ("4.51.3", "5.20.2", "5.23.0"),
}
TRITON_INDEX = "https://triton-ascend.osinfra.cn/pypi/simple"
TRITON = "3.2.1"  # the first version that can be installed beside triton
TORCH_INDEX = "https://download.pytorch.org/whl/cpu"
