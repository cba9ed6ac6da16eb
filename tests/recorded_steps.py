"""A stand-in on CPU for graphs of a device: operators are recorded, and replayed on their tensors.

What Python decides anew in each step, or reads from a tensor, is frozen here as in a real capture.
"""

import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

ATEN = torch.ops.aten
WAITS = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}


class RecordedSteps:
    """Has the methods of `device.graphs.GraphPool`.

    Attributes:
        num_captures: Of all pools since the last reset.
    """

    num_captures = 0

    def run_and_capture(self, work: Callable[[], None]) -> Callable[[], None]:
        """Run `work` and record it; return what replays it."""
        recorder = Recorder()
        with recorder:
            work()
        RecordedSteps.num_captures += 1
        return recorder.replay


class Recorder(TorchDispatchMode):
    """Records operators as they run; raises AssertionError at one that waits for a device.

    Results are kept until the end, so that no two share memory. Tensors from outside are not kept:
    a graph has no more than their addresses.
    """

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, Any, Any, Any]] = []  # operator, arguments, keywords, results
        self.results: set[int] = set()  # ids of all tensors that were made in the recording

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert not waits(func, args), f"{func} waits for the device in a capture"
        out = func(*args, **(kwargs or {}))
        arguments, keywords = tree_map(self._refer, (args, kwargs or {}))
        self.calls.append((func, arguments, keywords, out))
        self.results |= {id(leaf) for leaf in tree_leaves(out) if isinstance(leaf, Tensor)}
        return out

    def _refer(self, leaf: Any) -> Any:
        is_outside = isinstance(leaf, Tensor) and id(leaf) not in self.results
        return Outside(weakref.ref(leaf), leaf.data_ptr()) if is_outside else leaf

    def replay(self) -> None:
        """Run the operators again, with results in the tensors that the recording made."""
        for func, args, kwargs, recorded in self.calls:
            arguments, keywords = tree_map(resolve, (args, kwargs))
            out = func(*arguments, **keywords)
            for old, new in zip(tree_leaves(recorded), tree_leaves(out), strict=True):
                # A view of the same memory, or a result in place, has its values already.
                if isinstance(old, Tensor) and old.data_ptr() != new.data_ptr():
                    old.copy_(new)


def waits(func: Any, args: Any) -> bool:
    """Return whether a device's operator reads on the host, or copies from it."""
    if func is ATEN.lift_fresh.default:  # of `torch.tensor`
        return True
    if func in (ATEN.index.Tensor, ATEN.index_put.default, ATEN.index_put_.default):
        return any(isinstance(i, Tensor) and i.dtype is torch.bool for i in args[1])
    return bool(WAITS & set(func.tags))


@dataclass(frozen=True)
class Outside:
    """A tensor that the recording has not made, and the address that it had."""

    tensor: weakref.ref[Tensor]
    address: int


def resolve(leaf: Any) -> Any:
    """Return the tensor of an `Outside`, and anything else as it is."""
    if not isinstance(leaf, Outside):
        return leaf
    tensor = leaf.tensor()
    is_there = tensor is not None and tensor.data_ptr() == leaf.address
    assert is_there, "a graph reads where a tensor was that was freed or moved"
    return tensor
