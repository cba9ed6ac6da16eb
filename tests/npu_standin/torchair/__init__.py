"""torchair, graph mode of torch_npu: imported by MindSpeed, and not used by any rehearsal."""

from imported import Imported

__getattr__ = Imported("torchair").__getattr__
