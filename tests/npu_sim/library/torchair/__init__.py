"""torchair, graph mode of torch_npu: imported by MindSpeed, and never called."""

from imported import Imported

__getattr__ = Imported("torchair").__getattr__
