"""Replacement of triton-ascend: MindSpeed for core 0.16 defines kernels when it is imported.

No test runs a kernel.
"""

from imported import Imported
from torch.utils import _triton

_triton.has_triton_package = lambda: False  # or torch's compiler would use this package
__version__ = "3.2.1"  # a version of triton-ascend


def jit(function=None, **options):
    return function if function is not None else (lambda kernel: kernel)


def autotune(**options):
    return lambda kernel: kernel


def heuristics(values):
    return lambda kernel: kernel


class Config:
    def __init__(self, *args, **kwargs):
        """Ignore the choices of the autotuner, as no kernel runs."""


def cdiv(a, b):
    return -(-a // b)


def next_power_of_2(n):
    return 1 << (n - 1).bit_length()


__getattr__ = Imported("triton").__getattr__
