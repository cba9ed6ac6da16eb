"""`triton.language`: names for kernels that nothing runs."""

from imported import Imported

__getattr__ = Imported("triton.language").__getattr__
