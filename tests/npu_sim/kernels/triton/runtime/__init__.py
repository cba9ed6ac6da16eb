"""`triton.runtime`: names for kernels that nothing runs."""

from imported import Imported

__getattr__ = Imported("triton.runtime").__getattr__
