"""What the pickles of a checkpoint may name, and with which arguments.

Tensors, the metadata of `torch.distributed.checkpoint`, Megatron's arguments, numbers and random
states of numpy. A function or a class that is not here is refused; one that is here is refused with
arguments that no checkpoint gives it (a hook, an array of objects, another codec).
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

from mindspeed_rlxf.checkpoint.inert_pickle import Inert

Test = Callable[[tuple[Any, ...]], bool]
"""Of the arguments that an object is made of: are they what checkpoints have there?"""

NUMBERS = re.compile(r"[<>|=]?[?biufcSU]\d*")  # numpy dtypes that hold no objects


class Storage:
    """The data of a tensor, which lie outside the pickle."""


def _none(arguments: tuple[Any, ...]) -> bool:
    return not arguments


def _never(_arguments: tuple[Any, ...]) -> bool:
    """A class that is only ever named, as the argument of a function."""
    return False


def _of(*types: type) -> Test:
    """Just as many arguments, of these types."""

    def accepts(arguments: tuple[Any, ...]) -> bool:
        return len(arguments) == len(types) and all(map(isinstance, arguments, types))

    return accepts


def _all_of(*types: type) -> Test:
    """Any number of arguments of these types."""
    return lambda arguments: all(isinstance(argument, types) for argument in arguments)


def _one(pattern: str) -> Test:
    return lambda a: len(a) == 1 and isinstance(a[0], str) and bool(re.fullmatch(pattern, a[0]))


def is_fields(state: Any) -> bool:
    """Attributes by name, none of those that Python itself looks at."""
    return isinstance(state, dict) and all(
        isinstance(name, str) and not name.startswith("__") for name in state
    )


def is_attributes(state: Any) -> bool:
    """Of an object: by name, or those and its slots."""
    parts = state if isinstance(state, tuple) and len(state) == 2 else (state,)
    return all(part is None or is_fields(part) for part in parts)


def _is(value: Any, *names: str) -> bool:
    """Whether it is the class or the function of that name."""
    return isinstance(value, type) and getattr(value, "named", "") in names


def _is_latin(arguments: tuple[Any, ...]) -> bool:
    return _of(str, str)(arguments) and arguments[1] in ("latin1", "latin-1")


def _is_encoded(arguments: tuple[Any, ...]) -> bool:
    """Bytes as older protocols write them."""
    return len(arguments) == 1 and getattr(arguments[0], "named", "") == "_codecs.encode"


def _integers(value: Any) -> bool:
    return isinstance(value, tuple) and all(type(item) is int for item in value)


def _is_tensor(arguments: tuple[Any, ...]) -> bool:
    """storage, offset, shape, stride[, requires_grad, hooks[, metadata]]; never a hook."""
    if not 4 <= len(arguments) <= 7 or not isinstance(arguments[0], Storage):
        return False
    _, offset, shape, stride, *rest = arguments
    good = isinstance(offset, int) and _integers(tuple(shape)) and _integers(tuple(stride))
    return good and all(item is None or isinstance(item, bool) or item == {} for item in rest)


def _is_parameter(arguments: tuple[Any, ...]) -> bool:
    """tensor, requires_grad, hooks[, attributes]."""
    if len(arguments) not in (3, 4) or not isinstance(arguments[0], Inert):
        return False
    return arguments[2] == {} and (len(arguments) == 3 or is_fields(arguments[3]))


def _is_typed(arguments: tuple[Any, ...]) -> bool:
    """function, its type, its arguments, attributes."""
    if len(arguments) != 4 or not _is(arguments[1], "torch.Tensor", *PARAMETER_CLASSES):
        return False
    function, _, inner, state = arguments
    of_tensor = _is(function, "torch._utils._rebuild_tensor_v2") and isinstance(inner, tuple)
    of_parameter = _is(function, "torch._utils._rebuild_parameter") and isinstance(inner, tuple)
    good = (of_tensor and _is_tensor(inner)) or (of_parameter and _is_parameter(inner))
    return good and is_attributes(state)


def _is_new_array(arguments: tuple[Any, ...]) -> bool:
    return len(arguments) == 3 and _is(arguments[0], "numpy.ndarray") and arguments[1] == (0,)


def _is_scalar(arguments: tuple[Any, ...]) -> bool:
    return len(arguments) == 2 and getattr(arguments[0], "named", "") == "numpy.dtype"


def _is_dtype(arguments: tuple[Any, ...]) -> bool:
    return (
        bool(arguments) and isinstance(arguments[0], str) and bool(NUMBERS.fullmatch(arguments[0]))
    )


def _is_array_state(state: Any) -> bool:
    """version, shape, dtype, order, bytes; a dtype of objects is refused on its own."""
    return (
        isinstance(state, tuple)
        and len(state) == 5
        and _integers(state[1])
        and (_is_scalar((state[2], None)) and isinstance(state[4], bytes | Inert))
    )


def _is_dtype_state(state: Any) -> bool:
    """version, byte order, no fields, sizes."""
    return isinstance(state, tuple) and all(isinstance(i, int | str | None) for i in state)


def _is_bytes_io_state(state: Any) -> bool:
    return isinstance(state, tuple) and len(state) == 3 and state[2] in (None, {})


_ENUM = _of(int | str)  # type: ignore[arg-type]
_DCP = "torch.distributed.checkpoint"
_MEGATRON_ENUMS = {
    "megatron.core.enums": ("ModelType", "Fp8Recipe", "Fp4Recipe"),
    "megatron.core.transformer.enums": (
        *("ModelType", "LayerType", "AttnType", "AttnMaskType", "AttnBackend", "CudaGraphScope"),
    ),
    "megatron.core.rerun_state_machine": (
        *("RerunDiagnostic", "RerunMode", "RerunState", "RerunValidationStatus"),
    ),
    "megatron.legacy.model.enums": ("LayerType", "AttnType", "AttnMaskType"),
    "megatron.model.enums": ("LayerType", "AttnType", "AttnMaskType", "PositionEmbeddingType"),
    "megatron.training.checkpointing": ("CheckpointType",),
}
PARAMETER_CLASSES = ("torch.nn.parameter.Parameter", "torch.nn.Parameter")
BYTES_IO = ("_io.BytesIO", "io.BytesIO")

ALLOWED: dict[str, Test] = {
    "argparse.Namespace": _none,
    "types.SimpleNamespace": _none,
    "pathlib.PosixPath": _all_of(str),
    "pathlib._local.PosixPath": _all_of(str),
    "signal.Signals": _ENUM,
    "_codecs.encode": _is_latin,
    **dict.fromkeys(BYTES_IO, lambda a: not a or _of(bytes)(a)),
    **{
        f"{module}.{name}": accepts
        for module in ("builtins", "__builtin__")
        for name, accepts in {
            "bytes": _none,  # none at all, as old protocols write them
            "set": _of(list),
            "frozenset": _of(list),
            "bytearray": lambda a: not a or _of(bytes)(a) or _is_latin(a) or _is_encoded(a),
            "complex": _of(float, float),
            "slice": lambda a: len(a) == 3 and all(i is None or isinstance(i, int) for i in a),
            "range": _of(int, int, int),
            "xrange": _of(int, int, int),
        }.items()
    },
    "torch.Tensor": _never,
    **dict.fromkeys(PARAMETER_CLASSES, _never),
    "torch.device": lambda a: _of(str)(a) or _of(str, int)(a),
    "torch._utils._rebuild_tensor": _is_tensor,
    "torch._utils._rebuild_tensor_v2": _is_tensor,
    "torch._utils._rebuild_parameter": _is_parameter,
    "torch._utils._rebuild_parameter_with_state": _is_parameter,
    "torch._tensor._rebuild_from_type_v2": _is_typed,
    "torch.serialization._get_layout": _one(r"torch\.\w+"),
    **dict.fromkeys(
        (
            *(
                f"{_DCP}.metadata.{name}"
                for name in (
                    "Metadata",
                    "MetadataIndex",
                    "StorageMeta",
                    "TensorStorageMetadata",
                    "TensorProperties",
                    "BytesStorageMetadata",
                    "ChunkStorageMetadata",
                )
            ),
            f"{_DCP}.filesystem._StorageInfo",
            *(f"{_DCP}.planner.{name}" for name in ("SavePlan", "WriteItem", "TensorWriteData")),
            "megatron.core.dist_checkpointing.strategies.torch.MCoreMetadata",
            "megatron.core.dist_checkpointing.strategies.torch.MCoreSavePlan",
            "megatron.core.optimizer.optimizer_config.OptimizerConfig",
        ),
        _none,
    ),
    f"{_DCP}.metadata._MEM_FORMAT_ENCODING": _ENUM,
    f"{_DCP}.planner.WriteItemType": _ENUM,
    "numpy.ndarray": _never,
    "numpy.dtype": _is_dtype,
    "numpy.dtypes.UInt32DType": _none,
    **{
        f"numpy.{core}.multiarray.{name}": accepts
        for core in ("core", "_core")
        for name, accepts in (("_reconstruct", _is_new_array), ("scalar", _is_scalar))
    },
    **{f"{module}.{name}": _ENUM for module, names in _MEGATRON_ENUMS.items() for name in names},
}
"""What a checkpoint may name, and what of."""

STATES: dict[str, Callable[[Any], bool]] = {
    "numpy.dtype": _is_dtype_state,
    **{f"numpy.{c}.multiarray._reconstruct": _is_array_state for c in ("core", "_core")},
    **dict.fromkeys(BYTES_IO, _is_bytes_io_state),
    f"{_DCP}.metadata.TensorProperties": lambda s: is_fields(s) or isinstance(s, tuple),
}
"""States that are no plain attributes."""
