"""Says whether a pickle holds only what checkpoints are made of, without running any of it.

Megatron-core and torch unpickle parts of a checkpoint freely, so a folder from elsewhere could run
code. Here every name that a pickle wants is looked up in a list (`pickle_names`); an object on it
is stood for by one that checks its arguments and its state, so that a harmless class cannot be
misused either.
"""

from __future__ import annotations

import copyreg
import io
import re
import tarfile
from functools import cache, lru_cache
from typing import IO, Any, ClassVar

import torch

from mindspeed_rlxf.checkpoint.inert_pickle import (
    Guarded,
    Inert,
    InertUnpickler,
    Refused,
    read_pickle,
)
from mindspeed_rlxf.checkpoint.pickle_names import (
    ALLOWED,
    BYTES_IO,
    STATES,
    Storage,
    Test,
    is_attributes,
)
from mindspeed_rlxf.checkpoint.zip_pickles import ZIP, pickles_of

LEGACY_MAGIC = 0x1950A86A20F9469CFC6C  # first pickle of a file that torch wrote before 1.6
LEGACY_REST = 4  # protocol, system, the object, keys of the storages
STORAGE = re.compile(r"(Double|Float|Half|BFloat16|Long|Int|Short|Char|Byte|Bool|Untyped)Storage")
LONGEST_KNOWN = 1024  # bytes


class Checked(Inert):
    """Stands for an object of a listed class; refuses what such an object is never made of."""

    named: ClassVar[str]
    accepts: ClassVar[Test]

    def __new__(cls, *arguments: Any, **keywords: Any) -> Checked:
        if keywords or not cls.accepts(arguments):
            raise Refused(f"{cls.named} with arguments that no checkpoint gives it")
        if cls.named in BYTES_IO and arguments:
            scan(io.BytesIO(arguments[0]))
        instance = super().__new__(cls, *arguments)
        assert isinstance(instance, Checked), "made of this class"
        return instance

    def __call__(self, *_arguments: Any, **_keywords: Any) -> Inert:
        raise Refused(f"a call of what {self.named} returns")

    def __setstate__(self, state: Any) -> None:
        if not STATES.get(self.named, is_attributes)(state):
            raise Refused(f"{self.named} with a state that no checkpoint gives it")
        arguments = self.arguments
        super().__setstate__(state)
        if self.arguments is not arguments or {"named", "accepts"} & vars(self).keys():
            raise Refused(f"{type(self).named} with a state that hides what it is made of")
        if self.named in BYTES_IO and _as_bytes(state[0]):
            scan(io.BytesIO(_as_bytes(state[0])))


@cache
def _stand_in(module: str, name: str) -> type:
    named = f"{module}.{name}"
    return Guarded(name, (Checked,), {"named": named, "accepts": staticmethod(ALLOWED[named])})


class _StorageType(metaclass=Guarded):
    """`torch.FloatStorage` and so on, which only tensors name."""

    def __init__(self) -> None:
        raise Refused("a storage that is made, not read")


class Scanner(InertUnpickler):
    """Unpickles stand-ins. Errors: Refused at the first name that is not on the list."""

    def find_class(self, module: str, name: str) -> Any:
        if f"{module}.{name}" in ALLOWED:
            return _stand_in(module, name)
        if module in ("torch", "torch.storage") and STORAGE.fullmatch(name):
            return _StorageType
        known = super().find_class(module, name)
        if isinstance(known, torch.dtype) or (module, name) in self.KNOWN:
            return known
        raise Refused(f"{module}.{name}")

    def persistent_load(self, pid: Any) -> Any:
        """pid: ("storage", type, key, device, elements[, view]), as `torch.save` writes it."""
        good = isinstance(pid, tuple) and len(pid) in (5, 6) and pid[0] == "storage"
        if not good or pid[1] is not _StorageType or not isinstance(pid[4], int):
            raise Refused(f"a reference to something outside, {str(pid)[:80]}")
        return Storage()


def scan_pickle(file: IO[bytes]) -> Any:
    """Read one pickle; returns stand-ins. Errors: Refused; ValueError when it is damaged."""
    # An extension that was used before would be taken from this cache, past the list.
    copyreg.clear_extension_cache()  # type: ignore[attr-defined]
    try:
        return read_pickle(file, Scanner)
    finally:
        copyreg.clear_extension_cache()  # type: ignore[attr-defined]


def scan(file: IO[bytes]) -> None:
    """All pickles of a file: of `torch.save`, old or new, or a plain one.

    Errors: Refused; ValueError when it is damaged or of a kind that cannot be scanned.
    """
    magic = file.read(len(ZIP))
    file.seek(0)
    if magic == ZIP:
        for pickled in pickles_of(file):
            _scan_known(pickled)
        return
    _refuse_tar(file)
    file.seek(0)
    if scan_pickle(file) == LEGACY_MAGIC:
        for _ in range(LEGACY_REST):
            scan_pickle(file)


def _refuse_tar(file: IO[bytes]) -> None:
    """What torch wrote before 0.1.1 and still reads, before it looks for anything else."""
    try:
        tarfile.open(fileobj=file, mode="r:").close()
    except tarfile.TarError:
        return
    raise Refused("a tar archive, which torch reads as pickles")


def _scan_known(pickled: bytes) -> None:
    """The pickles of most tensors are the same, byte for byte."""
    if len(pickled) > LONGEST_KNOWN:
        scan_pickle(io.BytesIO(pickled))
    else:
        _scan_short(pickled)


@lru_cache(maxsize=4096)  # of those that passed: an error is not kept
def _scan_short(pickled: bytes) -> None:
    scan_pickle(io.BytesIO(pickled))


def _as_bytes(value: Any) -> bytes:
    """Bytes, also as older protocols write them: text and how to encode it."""
    if isinstance(value, Checked) and value.named == "_codecs.encode":
        return str(value.arguments[0]).encode("latin1")
    if isinstance(value, Checked) and value.named.endswith(".bytes"):
        return b""
    if not isinstance(value, bytes):
        raise Refused("a file in memory without bytes")
    return value
