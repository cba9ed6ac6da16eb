"""torchair, graph mode of torch_npu: imported by MindSpeed, run by nothing that is rehearsed."""

from imported import Imported

__getattr__ = Imported("torchair").__getattr__
