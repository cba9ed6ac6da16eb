"""`triton.runtime.driver`: the target npu, and placeholders for all other names."""

from types import SimpleNamespace

from imported import Imported

active = SimpleNamespace(
    get_current_target=lambda: SimpleNamespace(backend="npu"),
    utils=Imported("triton.runtime.driver.active.utils"),
)

__getattr__ = Imported("triton.runtime.driver").__getattr__
