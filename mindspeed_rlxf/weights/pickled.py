"""Read pickled checkpoint files without running code in them.

torch.save files go through `torch.load(weights_only=True)`, a sharded checkpoint's `.metadata`
through an unpickler that finds only the listed names. Non-torch classes become stand-ins.
"""

from __future__ import annotations

import collections
import io
import pickle
import re
import warnings
import zipfile
from pathlib import Path
from typing import Any

import torch
from packaging.version import Version

SAFE_TORCH = "2.10"  # `weights_only` of older versions can be made to run code: CVE-2026-24747

_DCP = "torch.distributed.checkpoint"
STAND_INS: dict[str, tuple[str, ...]] = {
    "argparse": ("Namespace",),
    "types": ("SimpleNamespace",),
    "pathlib": ("PosixPath",),
    "pathlib._local": ("PosixPath",),
    "signal": ("Signals",),
    "_io": ("BytesIO",),
    "builtins": ("bytes", "frozenset", "slice", "range"),
    "numpy": ("ndarray", "dtype"),
    "numpy.dtypes": ("UInt32DType",),
    "numpy.core.multiarray": ("_reconstruct", "scalar"),
    "numpy._core.multiarray": ("_reconstruct", "scalar"),
    "megatron.core.enums": ("ModelType", "Fp8Recipe", "Fp4Recipe"),
    "megatron.core.optimizer.optimizer_config": ("OptimizerConfig",),
    "megatron.core.rerun_state_machine": (
        *("RerunDiagnostic", "RerunMode", "RerunState", "RerunValidationStatus"),
    ),
    "megatron.core.transformer.enums": (
        *("ModelType", "LayerType", "AttnType", "AttnMaskType", "AttnBackend", "CudaGraphScope"),
    ),
    "megatron.legacy.model.enums": ("LayerType", "AttnType", "AttnMaskType"),
    "megatron.model.enums": ("LayerType", "AttnType", "AttnMaskType", "PositionEmbeddingType"),
    "megatron.training.checkpointing": ("CheckpointType",),
}
"""Module -> names that a file of torch.save may have beside those that torch allows."""

METADATA_STAND_INS: dict[str, tuple[str, ...]] = {
    f"{_DCP}.metadata": (
        *("Metadata", "MetadataIndex", "StorageMeta", "TensorStorageMetadata", "TensorProperties"),
        *("BytesStorageMetadata", "ChunkStorageMetadata", "_MEM_FORMAT_ENCODING"),
    ),
    f"{_DCP}.filesystem": ("_StorageInfo",),
    f"{_DCP}.planner": ("SavePlan", "WriteItem", "TensorWriteData", "WriteItemType"),
    "megatron.core.dist_checkpointing.strategies.torch": ("MCoreMetadata", "MCoreSavePlan"),
    "pathlib": ("PosixPath",),
    "pathlib._local": ("PosixPath",),
    "torch.serialization": ("_get_layout",),
}


class StandIn:
    """Replaces a pickled object: keeps its arguments and state, and calls nothing."""

    arguments: tuple[Any, ...]
    state: Any = None  # argument to `__setstate__`, mostly attributes by name; None = nothing

    def __new__(cls, *arguments: Any, **_: Any) -> StandIn:
        """Keep the arguments."""
        stand_in = object.__new__(cls)
        stand_in.arguments = arguments
        return stand_in

    def __setstate__(self, state: Any) -> None:
        """Keep the state."""
        self.state = state


def _classes(names: dict[str, tuple[str, ...]]) -> dict[tuple[str, str], Any]:
    return {
        (module, name): type(name, (StandIn,), {"__module__": module})
        for module, of_module in names.items()
        for name in of_module
    }


_SAFE: list[Any] = list(_classes(STAND_INS).values())
_IN_METADATA = _classes(METADATA_STAND_INS) | {
    ("collections", "OrderedDict"): collections.OrderedDict,
    ("torch", "Size"): torch.Size,
    ("builtins", "set"): set,
}


def read_torch_file(path: Path, trust_files: bool = False) -> Any:
    """Return the object in a torch.save file; tensors in a zip file are mapped, not read.

    `trust_files` allows a torch older than SAFE_TORCH.

    Raises:
        ValueError: it cannot be read, or has anything but data.
    """
    return load_pickled(str(path), path, trust_files, mmap=zipfile.is_zipfile(path))


def load_pickled(source: Any, path: Path, trust_files: bool, **options: Any) -> Any:
    """Like `read_torch_file`, from any `source`; `path` is for messages, `options` for torch."""
    if not trust_files and Version(torch.__version__) < Version(SAFE_TORCH):
        raise ValueError(
            f"{path} is a pickled file, which torch {torch.__version__} cannot read safely "
            f"(CVE-2026-24747); convert the weights with torch {SAFE_TORCH} or newer, or set "
            "trust_files: true (convert: --trust-files) if you trust who made it"
        )
    previous_globals = torch.serialization.get_safe_globals()
    torch.serialization.clear_safe_globals()  # of the classes that Megatron allows
    try:
        with torch.serialization.safe_globals(_SAFE), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # on protocols, which the errors tell too
            return torch.load(source, map_location="cpu", weights_only=True, **options)
    except Exception as error:  # whatever torch raises for damage
        raise _refusal(path, error) from None
    finally:
        torch.serialization.add_safe_globals(previous_globals)


class _MetadataUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        """Return a listed name's stand-in, class or dtype; imports nothing."""
        if (module, name) in _IN_METADATA:
            return _IN_METADATA[module, name]
        if module == "torch" and isinstance(vars(torch).get(name), torch.dtype):
            return vars(torch)[name]
        raise pickle.UnpicklingError(f"GLOBAL {module}.{name} is not allowed")


def read_metadata(path: Path) -> Any:
    """Return the object in a sharded checkpoint's `.metadata`.

    Raises:
        ValueError: it cannot be read, or has anything but data.
    """
    try:
        return _MetadataUnpickler(io.BytesIO(path.read_bytes()), encoding="utf-8").load()
    except Exception as error:  # whatever a damaged pickle ends in
        raise _refusal(path, error) from None


def _refusal(path: Path, error: Exception) -> ValueError:
    match = re.search(r"GLOBAL ([\w.]+)|function <?([\w. ]+)", str(error))
    if match:
        return ValueError(
            f"{path} must hold nothing but data, and it has {match[1] or match[2]}; if you made "
            "it, take that out and save it again"
        )
    text = " ".join(str(error).rpartition("WeightsUnpickler error: ")[2].split())[:200]
    return ValueError(f"{path} cannot be read ({type(error).__name__}: {text}); copy it again")
