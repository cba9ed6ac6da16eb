"""Reads pickled data without running any of it.

A pickle may name any function to be called while it is read. Here a name never reaches a module:
it becomes one of the few harmless types below or a class that only keeps what it is given. So
checkpoints of tools that are not installed can be read, and none can run code.
"""

from __future__ import annotations

import pickle
from argparse import Namespace
from collections import OrderedDict
from typing import IO, Any, ClassVar

import torch


class Refused(ValueError):
    """A pickle that wants more than data."""


class Guarded(type):
    """Of classes that a pickle gets: it may make instances of them, not change them."""

    @property
    def __setstate__(cls) -> Any:
        """What a pickle looks for before it sets attributes, of the class itself too."""
        raise Refused(f"new attributes for the class {cls.__name__}")


class Inert(metaclass=Guarded):
    """Stands for an object of any class: keeps its arguments and its state, computes nothing."""

    arguments: tuple[Any, ...]

    def __init__(self, *_arguments: Any, **_keywords: Any) -> None:
        """Everything is kept by `__new__`, which a pickle may call alone."""

    def __new__(cls, *arguments: Any, **_keywords: Any) -> Inert:
        instance = object.__new__(cls)
        instance.__dict__["arguments"] = arguments
        return instance

    def __call__(self, *_arguments: Any, **_keywords: Any) -> Inert:
        return Inert()

    def __setstate__(self, state: Any) -> None:
        """Attributes, or a pair of these and of slots, which an unpickler sets after them."""
        self.__dict__["state"] = state
        for part in state if isinstance(state, tuple) and len(state) == 2 else (state,):
            if isinstance(part, dict):
                self.__dict__.update({k: v for k, v in part.items() if isinstance(k, str)})

    def __setitem__(self, key: Any, value: Any) -> None:
        """What a pickled mapping of some class does with its items."""

    def append(self, item: Any) -> None:
        """What a pickled sequence of some class does with its items."""

    def extend(self, items: Any) -> None:
        """As `append`."""


class Arguments(Namespace, metaclass=Guarded):
    """A namespace, of a class that is not everybody's."""


class InertUnpickler(pickle.Unpickler):
    """Gives dicts, lists, strings, numbers, namespaces; anything else as `Inert`."""

    KNOWN: ClassVar[dict[tuple[str, str], Any]] = {
        ("collections", "OrderedDict"): OrderedDict,
        ("argparse", "Namespace"): Arguments,
        ("torch", "Size"): torch.Size,
    }

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in self.KNOWN:
            return self.KNOWN[module, name]
        named = vars(torch).get(name) if module == "torch" else None
        return named if isinstance(named, torch.dtype) else Guarded(name, (Inert,), {})

    def persistent_load(self, pid: Any) -> Any:
        return Inert()


def read_pickle(file: IO[bytes], reader: type[InertUnpickler] = InertUnpickler) -> Any:
    """What is in the file. Errors: ValueError when it is damaged, Refused as the reader says."""
    try:
        return reader(file).load()
    except Refused:
        raise
    except (pickle.UnpicklingError, EOFError, ValueError, TypeError, AttributeError) as error:
        raise ValueError(f"damaged pickle: {error}") from None
    except (IndexError, KeyError, OverflowError, MemoryError, RecursionError) as error:
        raise ValueError(f"damaged pickle: {error!r}") from None
