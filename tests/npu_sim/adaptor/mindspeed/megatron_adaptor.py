"""A small replacement of MindSpeed: the patches that the models of this project need.

As in the branch core_r0.16.0, Megatron's core attention, norm and activation call operators of
torch_npu, and calls of CUDA go to NPU. MindSpeed's optimizer and other features are missing.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist

from tests.npu_sim import watch

COMPRESSED = 2048  # size of both axes of the mask that causal modes take
LEFT_UP = 2  # sparse mode of the fused attention: causal, aligned at the first token


def _refuse_late_start() -> None:
    early = sorted(name for name in sys.modules if name.startswith("megatron."))
    if early:
        raise RuntimeError(
            f"MindSpeed's adaptor must be imported before Megatron, but {early[0]} is imported "
            "already, with references to functions that are not patched; import the adaptor first"
        )


def _plain(*args: Any, **kwargs: Any) -> Any:
    return args[0] if args and callable(args[0]) else lambda function: function


def _type_of_cuda(original: Callable[..., Any]) -> Callable[..., Any]:
    """Replace npu by cuda in the type names that `Tensor.type` returns: Megatron expects cuda."""

    @functools.wraps(original)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        found = original(*args, **kwargs)
        return found.replace("npu", "cuda") if isinstance(found, str) else found

    return wrapper


def _drops_fp64(original: Callable[..., Any]) -> Callable[..., Any]:
    """Leave fp64 tensors unreduced: MindSpeed reduces an fp32 copy and drops the result."""

    @functools.wraps(original)
    def wrapper(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if tensor.dtype is not torch.double:
            return original(tensor, *args, **kwargs)
        original(tensor.float(), *args, **kwargs)
        return None

    return wrapper


def _patch_torch() -> None:
    from torch_npu import npu
    from torch_npu.contrib import transfer_to_npu  # noqa: F401

    torch.compile = torch.jit.script = _plain
    torch.Tensor.type = _type_of_cuda(torch.Tensor.type)
    dist.all_reduce = _drops_fp64(dist.all_reduce)
    torch.cuda.get_device_capability = lambda device=None: (0, 0)
    torch.cuda.nvtx.range_push = npu.mstx.range_start
    torch.cuda.nvtx.range_pop = npu.mstx.range_end


@functools.cache
def _causal_mask(device: torch.device) -> torch.Tensor:
    return torch.ones(COMPRESSED, COMPRESSED, dtype=torch.bool, device=device).triu(1)


def _attention(
    self: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: Any,
    attn_mask_type: Any = None,
    attention_bias: Any = None,
    packed_seq_params: Any = None,
) -> torch.Tensor:
    """Replace the forward of DotProductAttention by the fused operator, with a causal mask.

    Packed sequences use the layout TND, padded ones SBH.
    """
    import torch_npu

    assert attention_mask is None and attention_bias is None, "only a causal mask is supported"
    heads, more = query.size(-2), {}
    if packed_seq_params is None:
        query, key, value = (x.flatten(2) for x in (query, key, value))
    else:
        ends = (packed_seq_params.cu_seqlens_q, packed_seq_params.cu_seqlens_kv)
        more = dict(zip(("actual_seq_qlen", "actual_seq_kvlen"), ends, strict=True))
    return torch_npu.npu_fusion_attention(
        query, key, value, heads, "TND" if more else "SBH",
        atten_mask=_causal_mask(query.device), scale=self.softmax_scale, sparse_mode=LEFT_UP,
        **more,
    )[0]  # fmt: skip


class Norm(torch.nn.Module):
    def __init__(self, config: Any, hidden_size: int, eps: float = 1e-5, **_: Any) -> None:
        super().__init__()
        self.eps = eps
        self.weight = torch.nn.Parameter(torch.ones(hidden_size, dtype=config.params_dtype))
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        import torch_npu

        return torch_npu.npu_rms_norm(hidden, self.weight, epsilon=self.eps)[0]


class Swiglu:
    @staticmethod
    def apply(gates: torch.Tensor, *_: Any) -> torch.Tensor:
        import torch_npu

        return torch_npu.npu_swiglu(gates, dim=-1)


def repatch(arguments: Mapping[str, Any]) -> None:
    """Patch Megatron, as MindSpeed's `repatch` does, and check packs at the fused attention."""
    assert arguments["use_flash_attn"], "the small adaptor supports only the fused attention"
    from megatron.core.fusions import fused_bias_swiglu
    from megatron.core.transformer import torch_norm
    from megatron.core.transformer.dot_product_attention import DotProductAttention

    DotProductAttention.forward = _attention
    torch_norm.WrappedTorchNorm = Norm
    fused_bias_swiglu.SwiGLUFunction = Swiglu
    watch.check_packs()


_refuse_late_start()
_patch_torch()
