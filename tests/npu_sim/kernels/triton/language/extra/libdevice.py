"""`triton.language.extra.libdevice`: names for kernels that nothing runs."""

from imported import Imported

__getattr__ = Imported("triton.language.extra.libdevice").__getattr__
