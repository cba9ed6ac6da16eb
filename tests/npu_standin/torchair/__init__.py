"""torchair, graph mode of torch_npu: imported by MindSpeed, run by nothing that is rehearsed."""

from imported import Imported


def __getattr__(name):
    if name.startswith("__"):
        raise AttributeError(name)
    return Imported(f"torchair.{name}")
