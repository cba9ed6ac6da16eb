"""Select fused operators by trying them on this device, never by version.

Each TABLE row names an operator and a package providing it. `find` tries the rows in order: it
imports the operator, runs it forward and backward on a small input, and compares the result with
plain torch. Attention is tried with the model's head sizes, since kernels refuse some. A failing
operator is skipped with a log line. On NPU, where MindSpeed's operators replace Megatron's own
(`device.fuses_layers`), only SHARED_PROMPTS and DECODE are tried; on CPU nothing.
"""

import functools
import importlib
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from itertools import accumulate
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from mindspeed_rlxf import device
from mindspeed_rlxf.device import npu
from mindspeed_rlxf.device.copies import upload

logger = logging.getLogger(__name__)

HALF = torch.bfloat16
Lengths = tuple[int, ...]
TOLERANCE = 0.05  # for bf16 results with elements of about 1


class Operator(str, Enum):
    """An operation with fused implementations; the value is its name in the log."""

    ATTENTION = "attention of packed sequences"
    SHARED_PROMPTS = "attention of responses to one prompt"
    DECODE = "attention of a decode step"
    NORM = "root-mean-square norm"
    ROTARY = "rotary embedding"
    SWIGLU = "gated activation"
    GRADIENT = "gradient accumulation"


@dataclass(frozen=True)
class Source:
    """A package providing an operator.

    Attributes:
        load: returns the operator as our models call it; raises if it is not installed.
        probe: runs it on the device; raises if it fails or disagrees with plain torch.
    """

    operator: Operator
    name: str
    load: Callable[[], Any]
    probe: Callable[..., None]  # (operator, device, *sizes)


@functools.cache
def find(operator: Operator, *shape: int) -> Any:
    """Return the first TABLE implementation that works on this device, cached.

    None = use plain torch: on CPU, before `device.setup`, in deterministic mode (fused attention's
    backward adds in any order), or if every probe fails. Logs each attempt. `shape` has the model
    sizes for the probe, since kernels refuse some; () = the probe's own.
    """
    is_tried = device.tries_kernels()
    if device.fuses_layers() and operator in (Operator.SHARED_PROMPTS, Operator.DECODE):
        is_tried = True
    if not is_tried or torch.are_deterministic_algorithms_enabled():
        return None
    for source in (row for row in TABLE if row.operator is operator):
        try:
            implementation = source.load()
            source.probe(implementation, device.current_device(), *shape)
        except Exception as error:  # whatever a library of the device raises
            cause = f"{type(error).__name__}: {str(error).strip()}".splitlines()[0]
            logger.info("%s: %s does not work here (%s)", operator.value, source.name, cause)
            continue
        logger.info("%s: %s", operator.value, source.name)
        return implementation
    logger.info("%s: plain torch", operator.value)
    return None


def _varlen_attention(module: str, name: str, **causal: Any) -> Any:
    operator = getattr(importlib.import_module(module), name)

    def attend(
        query: Tensor, key: Tensor, value: Tensor, lengths: Lengths, key_lengths: Lengths
    ) -> Tensor:
        ends = sequence_ends(lengths, query.device)
        key_ends = sequence_ends(key_lengths, query.device)
        longest = max(lengths), max(key_lengths)
        out: Tensor = operator(query, key, value, ends, key_ends, *longest, **causal)
        return out

    return attend


def _npu_attention() -> Any:
    if not device.fuses_layers():
        raise ImportError("only on NPU")
    return npu.attend_to_longer_keys


def _npu_decode_attention() -> Any:
    if not device.fuses_layers():
        raise ImportError("only on NPU")
    return npu.attend_to_cache


# Cached, because every layer asks for those of the same pack.
@functools.lru_cache(maxsize=8)
def sequence_ends(lengths: Lengths, device: torch.device) -> Tensor:
    """Return 0 and the ends of packed sequences, [sequences + 1] int32."""
    return upload(torch.tensor([0, *accumulate(lengths)], dtype=torch.int32), device)


def noise(device: torch.device, *shape: int) -> Tensor:
    """Return normal bf16 noise that can have a gradient, equal for equal shapes."""
    numbers = torch.randn(shape, generator=torch.Generator().manual_seed(len(shape)))
    return numbers.to(device=device, dtype=HALF).requires_grad_()


def assert_close(actual: Tensor, expected: Tensor, inputs: Sequence[Tensor]) -> None:
    """Raise AssertionError unless both are equal, and their gradients of `inputs`, by TOLERANCE."""
    actual_gradients = torch.autograd.grad(actual.float().sum(), inputs)
    expected_gradients = torch.autograd.grad(expected.float().sum(), inputs)
    pairs = [(actual, expected), *zip(actual_gradients, expected_gradients, strict=True)]
    for tensor, reference in pairs:
        torch.testing.assert_close(
            tensor.float(), reference.float(), rtol=TOLERANCE, atol=TOLERANCE
        )


def _probe_attention(attend: Any, device: torch.device, *shape: int) -> None:
    """Raise AssertionError unless two packed sequences attend as in plain torch."""
    rows = torch.arange(24, device=device).split((5, 19))
    _compare_attention(attend, rows, rows, *shape)


def _probe_shared_prompts(attend: Any, device: torch.device, *shape: int) -> None:
    """Raise AssertionError unless two responses to one prompt attend as in plain torch."""
    prompt, first, second = torch.arange(24, device=device).split((7, 5, 12))
    seen = [prompt, torch.cat((prompt, first)), torch.cat((prompt, second))]
    _compare_attention(attend, (prompt, first, second), seen, *shape)


def _probe_decode(
    attend: Any, device: torch.device, heads: int = 4, groups: int = 2, width: int = 64
) -> None:
    """Raise AssertionError unless rows of 3 and 17 tokens attend as in plain torch."""
    capacity = 32
    query = noise(device, 2, heads, 1, width).detach()
    keys = noise(device, 2, groups, capacity, width).detach()
    values = noise(device, 2 * groups, capacity, width).detach().view(keys.shape)
    lengths = torch.tensor([[3], [17]], device=device)
    hidden = (torch.arange(capacity, device=device) >= lengths)[:, None, None]
    expected = F.scaled_dot_product_attention(
        query, keys, values, attn_mask=~hidden, enable_gqa=True
    )
    actual = attend(query, keys, values, hidden)
    torch.testing.assert_close(actual, expected, rtol=TOLERANCE, atol=TOLERANCE)


def _compare_attention(
    attend: Any,
    rows: Sequence[Tensor],
    seen: Sequence[Tensor],
    heads: int = 4,
    groups: int = 2,
    width: int = 64,
) -> None:
    """Compare with plain torch. rows, seen: each sequence's token and key indices."""
    device = rows[0].device
    query, key, value = (noise(device, 24, count, width) for count in (heads, groups, groups))
    lengths = tuple(map(len, rows))
    key_lengths = tuple(map(len, seen))
    all_keys = torch.cat(list(seen))
    actual = attend(query, key[all_keys], value[all_keys], lengths, key_lengths)
    outs = []
    for queries, keys in zip(rows, seen, strict=True):
        q, k, v = (x.transpose(0, 1)[None] for x in (query[queries], key[keys], value[keys]))
        mask = torch.ones(len(queries), len(keys), dtype=torch.bool, device=device)
        mask = mask.tril(len(keys) - len(queries))
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)
        outs.append(out[0].transpose(0, 1))
    assert_close(actual, torch.cat(outs), (query, key, value))


def _probe_norm(norm: Any, device: torch.device) -> None:
    hidden = noise(device, 8, 1, 64)
    module = norm(64, eps=1e-5, params_dtype=HALF, device=device)
    expected = module.weight * F.rms_norm(hidden.float(), (64,), eps=1e-5).to(HALF)
    assert_close(module(hidden), expected, (hidden, module.weight))


def _probe_rotary(rotate: Any, device: torch.device) -> None:
    angles = torch.arange(8.0, device=device)[:, None] / torch.arange(1.0, 65.0, device=device)
    for shape, angle_shape in (((8, 1, 2, 64), (8, 1, 1, 64)), ((8, 2, 64), (8, 1, 64))):
        query = noise(device, *shape)
        angle = angles.view(angle_shape)
        rotated_half = torch.cat((-query[..., 32:], query[..., :32]), dim=-1)
        expected = query * angle.cos().to(HALF) + rotated_half * angle.sin().to(HALF)
        assert_close(rotate(query, angle), expected, (query,))


def _probe_swiglu(activate: Any, device: torch.device) -> None:
    both = noise(device, 8, 1, 128)
    gate, up = both.chunk(2, dim=-1)
    assert_close(activate(both, None), F.silu(gate) * up, (both,))


def _probe_gradient(accumulate_fp32: Any, device: torch.device) -> None:
    inputs = noise(device, 16, 32).detach()
    grads = noise(device, 16, 8).detach()
    total = torch.ones(8, 32, device=device)
    expected = total + grads.float().t() @ inputs.float()
    accumulate_fp32(inputs, grads, total)
    torch.testing.assert_close(total, expected, rtol=TOLERANCE, atol=TOLERANCE)


_TORCH = functools.partial(
    _varlen_attention, "torch.nn.attention.varlen", "varlen_attn",
    window_size=(-1, 0), enable_gqa=True,
)  # fmt: skip
_FLASH = functools.partial(
    _varlen_attention, "flash_attn", "flash_attn_varlen_func", causal=True
)  # fmt: skip


def _from(module: str, name: str) -> Callable[[], Any]:
    return lambda: getattr(importlib.import_module(module), name)


class TorchNorm(torch.nn.RMSNorm):
    """Torch's norm, with one kernel forward and few backward on devices; arguments of TE's."""

    def __init__(
        self,
        hidden_size: int,
        eps: float,
        params_dtype: torch.dtype,
        sequence_parallel: bool = False,
        device: torch.device | None = None,
    ) -> None:
        super().__init__(hidden_size, eps=eps, dtype=params_dtype, device=device)
        self.weight.sequence_parallel = sequence_parallel  # type: ignore[attr-defined]


def _torch_norm() -> type[TorchNorm]:
    if not hasattr(torch.ops.aten, "_fused_rms_norm"):  # else several kernels in bf16
        raise ImportError(f"torch {torch.__version__} has no fused norm")
    return TorchNorm


def _transformer_engine_rotary() -> Any:
    module = importlib.import_module("megatron.core.extensions.transformer_engine")
    return with_batch_axis(module.fused_apply_rotary_pos_emb)


def with_batch_axis(fused: Any) -> Any:
    """Return a rotary operator that also takes packed tokens, which have no batch axis.

    `fused` takes [tokens, batch, heads, d] with angles [tokens, 1, 1, d]; Megatron passes packed
    tokens as [tokens, heads, d] with [tokens, 1, d].
    """

    def rotate(query: Tensor, angles: Tensor, interleaved: bool = False) -> Tensor:
        assert not interleaved, "no model here has interleaved angles"
        if query.dim() == 4:
            rotated: Tensor = fused(query, angles)
            return rotated
        rotated = fused(query.unsqueeze(1), angles.unsqueeze(1))
        return rotated.squeeze(1)

    return rotate


TABLE: tuple[Source, ...] = (
    Source(Operator.ATTENTION, "torch.nn.attention.varlen", _TORCH, _probe_attention),
    Source(Operator.ATTENTION, "flash_attn", _FLASH, _probe_attention),
    Source(Operator.SHARED_PROMPTS, "torch.nn.attention.varlen", _TORCH, _probe_shared_prompts),
    Source(Operator.SHARED_PROMPTS, "flash_attn", _FLASH, _probe_shared_prompts),
    Source(Operator.SHARED_PROMPTS, "torch_npu", _npu_attention, _probe_shared_prompts),
    Source(Operator.DECODE, "torch_npu", _npu_decode_attention, _probe_decode),
    Source(Operator.NORM, "transformer_engine",
           _from("transformer_engine.pytorch", "RMSNorm"), _probe_norm),
    Source(Operator.NORM, "torch", _torch_norm, _probe_norm),
    Source(Operator.ROTARY, "transformer_engine", _transformer_engine_rotary, _probe_rotary),
    Source(Operator.SWIGLU, "megatron.core",
           _from("megatron.core.fusions.fused_bias_swiglu", "bias_swiglu_impl"), _probe_swiglu),
    Source(Operator.GRADIENT, "apex",
           _from("fused_weight_gradient_mlp_cuda", "wgrad_gemm_accum_fp32"), _probe_gradient),
)  # fmt: skip
