"""`triton.language.extra`: names for kernels that nothing runs."""

from imported import Imported


def __getattr__(name):
    if name.startswith("__"):
        raise AttributeError(name)
    return Imported(f"triton.language.extra.{name}")
