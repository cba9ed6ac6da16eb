"""The classes and functions that pickles of a checkpoint may name, and their allowed arguments.

Tensors, the metadata of `torch.distributed.checkpoint`, Megatron's arguments, numbers and random
states of numpy. A function or a class that is not listed is refused. A listed one is refused with
arguments that no checkpoint gives it (a hook, an array of objects, another codec). Types are
compared exactly: `inert_pickle` makes values of plain types, `Named`, `Inert` and `Storage` only.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from types import NoneType
from typing import Any

import torch

Test = Callable[[tuple[Any, ...]], bool]
"""Whether an object of a checkpoint may be made of these arguments."""

NUMBERS = re.compile(r"[<>|=]?[?biufcSU]\d{0,6}")  # numpy dtypes that hold no objects
STORAGE_TYPE = re.compile(
    r"torch(\.storage)?\.(Double|Float|Half|BFloat16|Long|Int|Short|Char|Byte|Bool|Untyped)Storage"
)
ORDERED_DICT, SIZE = "collections.OrderedDict", "torch.Size"


class Refused(ValueError):
    """A pickle has something other than listed data, or exceeds a limit."""


class Named:
    """The name of a class or function, in place of the class or function itself."""

    __slots__ = ("text",)

    def __init__(self, text: str) -> None:
        self.text = text


class Inert:
    """Stands for an object of a listed class: the class's name and arguments; nothing is called.

    state: attributes by name, or the state that the class has instead; None = the pickle has none
    """

    __slots__ = ("arguments", "named", "state")

    def __init__(self, named: str, arguments: tuple[Any, ...]) -> None:
        self.named, self.arguments = named, arguments
        self.state: Any = None

    def field(self, name: str) -> Any:
        """Return the attribute of that name. Raises KeyError or TypeError where there is none."""
        return self.state[name]


class Storage:
    """The data of a tensor, which are outside the pickle."""


def _never(_arguments: tuple[Any, ...]) -> bool:
    """Accept no arguments: for classes that are only named, never instantiated."""
    return False


def _of(*types: type) -> Test:
    """Return a test that accepts exactly these types of arguments, in order."""
    return lambda arguments: tuple(map(type, arguments)) == types


_none = _of()


def _one_of(*types: type) -> Test:
    return lambda arguments: len(arguments) == 1 and type(arguments[0]) in types


def _all_of(*types: type) -> Test:
    """Return a test that accepts any number of arguments, each of one of these types."""
    return lambda arguments: all(type(argument) in types for argument in arguments)


def _one(pattern: str) -> Test:
    return lambda a: _of(str)(a) and bool(re.fullmatch(pattern, a[0]))


def is_fields(state: Any) -> bool:
    """Whether a state is a dict of attributes by name, none of which begins with "__"."""
    if type(state) is not dict or not set(map(type, state)) <= {str}:
        return False
    return "__" not in {name[:2] for name in state}


def is_attributes(state: Any) -> bool:
    """Whether a state is that of an object: None, attributes by name, or a pair of these.

    The pair is a tuple: attributes and slots.
    """
    if type(state) is dict:
        return is_fields(state)
    parts = state if type(state) is tuple and len(state) == 2 else (state,)
    return all(part is None or is_fields(part) for part in parts)


def _is(value: Any, *names: str) -> bool:
    """Whether a value is the `Named` of one of these names."""
    return type(value) is Named and value.text in names


def _is_object(value: Any, name: str) -> bool:
    return type(value) is Inert and value.named == name


def _is_latin(arguments: tuple[Any, ...]) -> bool:
    return _of(str, str)(arguments) and arguments[1] in ("latin1", "latin-1")


def are_integers(value: Any) -> bool:
    return type(value) is tuple and set(map(type, value)) <= {int}


def _is_tensor(arguments: tuple[Any, ...]) -> bool:
    """Whether these are the arguments of a tensor whose hooks and metadata are absent or empty.

    They are storage, offset, shape, stride[, requires_grad, hooks[, metadata]]. Of those after
    stride, each must be None, a bool or an empty dict.
    """
    if not 4 <= len(arguments) <= 7 or not isinstance(arguments[0], Storage):
        return False
    _, offset, shape, stride, *rest = arguments
    good = type(offset) is int and are_integers(shape) and are_integers(stride)
    return good and all(
        item is None or type(item) is bool or (type(item) is dict and not item) for item in rest
    )


def _is_parameter(arguments: tuple[Any, ...]) -> bool:
    """Whether these may be a parameter's arguments: tensor, requires_grad, hooks[, attributes].

    The first two are not checked, hooks must be an empty dict, attributes must be fields.
    """
    if len(arguments) not in (3, 4) or type(arguments[2]) is not dict or arguments[2]:
        return False
    return len(arguments) == 3 or is_fields(arguments[3])


def _is_typed(arguments: tuple[Any, ...]) -> bool:
    """Whether these are the arguments of a tensor or parameter with attributes.

    They are function, class, arguments of the function, attributes; all four are checked.
    """
    if len(arguments) != 4 or not _is(arguments[1], "torch.Tensor", *PARAMETER_CLASSES):
        return False
    function, _, inner, state = arguments
    of_tensor = _is(function, TENSOR) and type(inner) is tuple
    of_parameter = _is(function, PARAMETER) and type(inner) is tuple
    good = (of_tensor and _is_tensor(inner)) or (of_parameter and _is_parameter(inner))
    return good and is_attributes(state)


def _is_new_array(arguments: tuple[Any, ...]) -> bool:
    """Whether these are the arguments of an empty numpy array, which its state fills later."""
    return (
        len(arguments) == 3
        and _is(arguments[0], "numpy.ndarray")
        and are_integers(arguments[1])
        and arguments[1] == (0,)
    )


def _is_scalar(arguments: tuple[Any, ...]) -> bool:
    return len(arguments) == 2 and _is_object(arguments[0], "numpy.dtype")


def _is_dtype(arguments: tuple[Any, ...]) -> bool:
    """Whether these are the arguments of a numpy dtype of numbers."""
    return (
        bool(arguments)
        and type(arguments[0]) is str
        and bool(NUMBERS.fullmatch(arguments[0]))
        and all(type(a) in (bool, int) for a in arguments[1:])
    )


def _is_array_state(state: Any) -> bool:
    """Whether a state is that of a numpy array: version, shape, dtype, order, bytes.

    A dtype of objects is refused on its own.
    """
    return (
        type(state) is tuple
        and len(state) == 5
        and are_integers(state[1])
        and _is_scalar((state[2], None))
        and (type(state[4]) is bytes or _is_object(state[4], "builtins.bytes"))
    )


def _is_dtype_state(state: Any) -> bool:
    """Whether a state is that of a numpy dtype: version, byte order, no fields, sizes."""
    return type(state) is tuple and all(type(item) in (int, str, type(None)) for item in state)


def _is_bytes_io_state(state: Any) -> bool:
    """Whether a state is that of an io.BytesIO: bytes, position, no attributes."""
    return (
        type(state) is tuple
        and len(state) == 3
        and (type(state[0]) is bytes or _is_object(state[0], "__builtin__.bytes"))
        and (state[2] is None or (type(state[2]) is dict and not state[2]))
    )


_ENUM = _one_of(int, str)
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
TENSOR, PARAMETER = "torch._utils._rebuild_tensor_v2", "torch._utils._rebuild_parameter"
TYPED = "torch._tensor._rebuild_from_type_v2"
OF_STORAGE = (TENSOR, "torch._utils._rebuild_tensor")
TENSORS = {
    TENSOR: _is_tensor,
    "torch._utils._rebuild_tensor": _is_tensor,
    PARAMETER: _is_parameter,
    "torch._utils._rebuild_parameter_with_state": _is_parameter,
    TYPED: _is_typed,
}
"""Functions whose result is a tensor in the file, or a tensor that is their first argument."""

PARAMETER_CLASSES = ("torch.nn.parameter.Parameter", "torch.nn.Parameter")
BYTES_IO = ("_io.BytesIO", "io.BytesIO")

ALLOWED: dict[str, Test] = {
    ORDERED_DICT: _none,
    SIZE: lambda a: len(a) == 1 and are_integers(a[0]),
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
            "bytearray": lambda a: not a or _of(bytes)(a) or _is_latin(a),
            "complex": _of(float, float),
            "slice": lambda a: len(a) == 3 and all(type(i) in (int, type(None)) for i in a),
            "range": _of(int, int, int),
            "xrange": _of(int, int, int),
        }.items()
    },
    "torch.Tensor": _never,
    **dict.fromkeys(PARAMETER_CLASSES, _never),
    "torch.device": lambda a: _of(str)(a) or _of(str, int)(a),
    **TENSORS,
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
"""Name of each class and function that a checkpoint may have -> test of its arguments."""

STATES: dict[str, Callable[[Any], bool]] = {
    "numpy.dtype": _is_dtype_state,
    **{f"numpy.{c}.multiarray._reconstruct": _is_array_state for c in ("core", "_core")},
    **dict.fromkeys(BYTES_IO, _is_bytes_io_state),
    f"{_DCP}.metadata.TensorProperties": lambda state: is_fields(state) or type(state) is tuple,
}
"""Tests of states that are no plain attributes."""

MAX_KEY_PARTS = 8
MAX_KEY_NUMBER = 1 << 48
SHOWN = 120  # characters of a file's text in a message

_KEYS = frozenset((str, bool, bytes, NoneType, torch.dtype, Named, Inert))


def shorten(text: object) -> str:
    """Return text of a file for a message: its first SHOWN characters, unprintable ones escaped."""
    return "".join(c if c.isprintable() else f"\\x{ord(c):02x}" for c in str(text)[:SHOWN])


def kind_of(value: Any) -> str:
    """Describe a value for a message: text and integers as they are, shortened; others as "a TYPE".

    An Inert is "what NAME returns".
    """
    if type(value) is Inert:
        return f"what {value.named} returns"
    return shorten(value) if type(value) in (str, int) else f"a {type(value).__name__}"


def named_value(module: str, name: str) -> Any:
    """Return the Named of a listed name, or, for module "torch", the torch dtype of that name.

    The same name gives the same object. Raises Refused for names that are not listed.
    """
    text = f"{module}.{name}"
    known = _NAMES.get(text)
    if known is None:
        if module == "torch" and isinstance(vars(torch).get(name), torch.dtype):
            return vars(torch)[name]
        if text not in ALLOWED and not STORAGE_TYPE.fullmatch(text):
            raise Refused(shorten(text))
        known = _NAMES.setdefault(text, Named(text))
    return known


_NAMES: dict[str, Named] = {}  # as many as the list has


def attributes_of(state: Any) -> dict[str, Any]:
    """Return an object's attributes by name, with those of its slots, from its pickled state.

    Raises Refused for two of one name.
    """
    if type(state) is dict:
        return state
    pair = state if type(state) is tuple else (state, None)
    first, second = (part or {} for part in pair)
    if first.keys() & second.keys():
        raise Refused("an object with two attributes of one name")
    return {**first, **second}


def check_key(key: Any) -> None:
    """Raise Refused for a key of a dict that could be slow to hash or compare.

    Accepts text, types in _KEYS, integers of absolute value below MAX_KEY_NUMBER, and tuples of
    these with at most MAX_KEY_PARTS items.
    """
    for part in key if type(key) is tuple and len(key) <= MAX_KEY_PARTS else (key,):
        small = type(part) is int and abs(part) < MAX_KEY_NUMBER
        if not small and type(part) not in _KEYS and type(part) is not str:
            raise Refused(f"a key that is {kind_of(part)}")
