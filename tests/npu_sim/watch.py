"""Checks that a real device does not make, for faults that would stay unnoticed on it."""

import functools
import os
from collections.abc import Callable
from itertools import accumulate
from typing import Any

import torch

from tests.npu_sim import build

# Without `numpy`, which shares the memory and does not read it yet: Megatron's dispatcher of
# experts calls it before it waits for the copy.
HOST_READS = ("tolist", "item", "__int__", "__float__", "__bool__", "__index__")
_lengths: list[tuple[int, ...]] = []  # lengths of the packs being attended, the innermost last


def check_host_reads() -> None:
    """Patch Tensor: reading a host tensor before the copy into it has ended raises RuntimeError."""
    for name in HOST_READS:
        setattr(torch.Tensor, name, _after_copies(name, getattr(torch.Tensor, name)))


def _after_copies(name: str, read: Callable[..., Any]) -> Callable[..., Any]:
    is_pending = build.load().is_pending

    @functools.wraps(read)
    def wrapper(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if is_pending(self):
            raise RuntimeError(
                f"Tensor.{name} reads a copy from npu that has not ended: wait for its stream or "
                "event first, or copy without non_blocking"
            )
        return read(self, *args, **kwargs)

    return wrapper


def check_packs() -> None:
    """Patch the fused attention: wrong lengths for the sequences of a pack raise RuntimeError.

    The operator itself would let the tokens of one sequence attend to another sequence.
    """
    import torch_npu

    from mindspeed_rlxf.models.attention import PackedSequences

    attend, fused = PackedSequences.attend, torch_npu.npu_fusion_attention

    @functools.wraps(attend)
    def attend_known(self: Any, *args: Any, **kwargs: Any) -> Any:
        _lengths.append(self.lengths)
        try:
            return attend(self, *args, **kwargs)
        finally:
            _lengths.pop()

    @functools.wraps(fused)
    def fused_checked(*args: Any, **kwargs: Any) -> Any:
        if _lengths and (ends := kwargs.get("actual_seq_qlen")) is not None:
            check_pack(list(ends), _lengths[-1])
        return fused(*args, **kwargs)

    PackedSequences.attend = attend_known  # type: ignore[method-assign]
    torch_npu.npu_fusion_attention = fused_checked


def check_pack(ends: list[int], lengths: tuple[int, ...]) -> None:
    """Raise RuntimeError unless `ends` are those of neighbouring sequences of the pack."""
    given = [end - start for start, end in zip([0, *ends], ends, strict=False)]
    whole = list(lengths)
    found = any(whole[i : i + len(given)] == given for i in range(len(whole)))
    if not found:
        raise RuntimeError(
            f"a pack of sequences of {whole} tokens must be attended sequence by sequence, and "
            f"npu_fusion_attention got {given}; pass cumulative lengths (whole: "
            f"{list(accumulate(whole))})"
        )


def follow_environment() -> None:
    if os.environ.get("RLXF_SIM_DELAYED") == "1":
        check_host_reads()
