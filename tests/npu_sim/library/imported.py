"""Placeholders for names of torchair (graph mode) and triton-ascend, imported and never called."""

from __future__ import annotations

from typing import Any


class Imported:
    """A placeholder that gives further placeholders as attributes and results of calls.

    Using one as a number or a tensor is an error.
    """

    def __init__(self, name: str) -> None:
        self.__name__ = self.__qualname__ = name

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return Imported(f"{self.__name__}.{name}")

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Return a placeholder; a call of `register_...` returns a decorator without effect."""
        if self.__name__.rpartition(".")[2].startswith("register_"):
            return lambda function: function
        return Imported(f"{self.__name__}()")

    def __getitem__(self, index: Any) -> Any:
        return self

    def __repr__(self) -> str:
        return f"<{self.__name__}, imported only>"
