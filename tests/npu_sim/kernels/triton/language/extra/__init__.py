"""`triton.language.extra`: names for kernels that nothing runs."""

from imported import Imported

__getattr__ = Imported("triton.language.extra").__getattr__
