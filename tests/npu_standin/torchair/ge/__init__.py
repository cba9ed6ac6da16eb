"""`torchair.ge`."""

from imported import Imported


def __getattr__(name):
    if name.startswith("__"):
        raise AttributeError(name)
    return Imported(f"torchair.ge.{name}")
