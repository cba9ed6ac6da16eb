"""Rules of the device as data: which dtypes its operators take, with the source and its version.

Every rule has a source. OPERATORS lists operators that runs of this project call, with the dtypes
that the vendor documents; an operator without an entry takes every dtype. The rules of HCCL are in
`device/module.cpp`, those of memory and copies in `device/device.cpp`.
"""

import functools
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

# dtype in the vendor's table -> its name in torch's C++ code
DTYPES = {
    "bf16": "BFloat16", "fp16": "Half", "fp32": "Float", "fp64": "Double", "uint8": "Byte",
    "int8": "Char", "int16": "Short", "int32": "Int", "int64": "Long", "bool": "Bool",
}  # fmt: skip
INTEGERS = "uint8 int8 int16 int32 int64"
ALL = f"bf16 fp16 fp32 fp64 {INTEGERS} bool"
TABLE = "Ascend/pytorch v2.7.1-7.3.0, docs/zh/native_apis/pytorch_2-7-1"


@dataclass(frozen=True)
class Rule:
    """Which dtypes the first tensor of an operator may have, in the words of the vendor's table."""

    operator: str  # name in aten, without overload
    dtypes: str
    api: str  # row of the table
    file: str = "torch.md"  # file of the table
    takes_dtype: bool = True  # whether the argument `dtype` is accepted


OPERATORS = (
    Rule("_log_softmax", "bf16 fp16 fp32", "torch.nn.functional.log_softmax",
         "torch-nn-functional.md"),
    Rule("_softmax", "bf16 fp16 fp32 fp64", "torch.nn.functional.softmax",
         "torch-nn-functional.md"),
    Rule("abs", ALL, "torch.abs"),
    Rule("add", ALL, "torch.add"),
    Rule("addcdiv", "bf16 fp16 fp32 int64", "Tensor.addcdiv", "torch-Tensor.md"),
    Rule("addcmul", "bf16 fp16 fp32 fp64 uint8 int8 int32 int64", "torch.addcmul"),
    Rule("all", ALL, "torch.all"),
    Rule("amax", f"fp16 fp32 {INTEGERS} bool", "torch.amax"),
    Rule("any", ALL, "torch.any"),
    Rule("argmax", f"bf16 fp16 fp32 fp64 {INTEGERS}", "torch.argmax"),
    Rule("bitwise_and", f"{INTEGERS} bool", "torch.bitwise_and"),
    Rule("bitwise_not", f"{INTEGERS} bool", "torch.bitwise_not"),
    Rule("bmm", "bf16 fp16 fp32", "torch.bmm"),
    Rule("cat", ALL, "torch.cat"),
    Rule("clamp", f"bf16 fp16 fp32 fp64 {INTEGERS}", "torch.clamp"),
    Rule("cos", ALL, "torch.cos"),
    Rule("cumsum", ALL, "torch.cumsum"),
    Rule("div", ALL, "torch.div"),
    Rule("eq", ALL, "torch.eq"),
    Rule("equal", ALL, "torch.equal"),
    Rule("exp", "bf16 fp16 fp32 fp64 int64 bool", "torch.exp"),
    Rule("gather", ALL, "torch.gather"),
    Rule("ge", ALL, "torch.ge"),
    Rule("gt", ALL, "torch.gt"),
    Rule("index_add", ALL, "torch.index_add"),
    Rule("index_select", ALL, "Tensor.index_select", "torch-Tensor.md"),
    Rule("isneginf", f"bf16 fp16 fp32 {INTEGERS} bool", "torch.isneginf"),
    Rule("le", ALL, "torch.le"),
    Rule("lerp", "fp16 fp32", "torch.lerp"),
    Rule("linalg_vector_norm", "bf16 fp16 fp32", "torch.linalg.vector_norm", "torch-linalg.md"),
    Rule("log", ALL, "torch.log"),
    Rule("logical_and", f"bf16 fp16 fp32 {INTEGERS} bool", "torch.logical_and"),
    Rule("logsumexp", f"fp16 fp32 {INTEGERS} bool", "torch.logsumexp"),
    Rule("lt", ALL, "torch.lt"),
    Rule("masked_fill_", "bf16 fp16 fp32 int8 int32 int64 bool", "Tensor.masked_fill_",
         "torch-Tensor.md"),
    Rule("max", "bf16 fp16 fp32 int64 bool", "torch.max"),
    Rule("maximum", ALL, "torch.maximum"),
    Rule("mean", "bf16 fp16 fp32 fp64", "torch.mean"),
    Rule("mm", "bf16 fp16 fp32", "torch.mm"),
    Rule("mul", ALL, "torch.mul"),
    Rule("multinomial", "fp16 fp32", "torch.multinomial"),
    Rule("nan_to_num", f"bf16 fp16 fp32 {INTEGERS} bool", "torch.nan_to_num"),
    Rule("ne", ALL, "torch.ne"),
    Rule("neg", "bf16 fp16 fp32 int8 int32 int64", "torch.neg"),
    Rule("pow", f"bf16 fp16 fp32 fp64 {INTEGERS}", "torch.pow"),
    Rule("reciprocal", ALL, "torch.reciprocal"),
    Rule("rsqrt", ALL, "torch.rsqrt"),
    Rule("scatter_add", ALL, "torch.scatter_add"),
    Rule("searchsorted", f"fp16 fp32 fp64 {INTEGERS}", "torch.searchsorted"),
    Rule("sigmoid", ALL, "Tensor.sigmoid", "torch-Tensor.md"),
    Rule("sin", ALL, "torch.sin"),
    Rule("sort", f"bf16 fp16 fp32 {INTEGERS}", "torch.sort"),
    Rule("sqrt", ALL, "torch.sqrt"),
    Rule("sub", f"bf16 fp16 fp32 fp64 {INTEGERS}", "torch.sub"),
    Rule("sum", ALL, "torch.sum", takes_dtype=False),
    Rule("topk", f"bf16 fp16 fp32 fp64 {INTEGERS}", "torch.topk"),
    Rule("triu", ALL, "torch.triu"),
    Rule("zero_", ALL, "Tensor.zero_", "torch-Tensor.md"),
)  # fmt: skip

MASKS_EXPANDED = (9, 1)  # first CANN whose torch_npu (26.1.0) expands masks: op-plugin 9f593387
MASK_SOURCE = "ops-transformer, flash_attention_score_tiling_general.cpp; diffusers#13490"


def of_operators() -> dict[str, tuple[set[str], bool, str]]:
    """Return the rules for the device: operator -> (dtypes, whether it takes `dtype`, source)."""
    return {
        rule.operator: (
            {DTYPES[word] for word in rule.dtypes.split()},
            rule.takes_dtype,
            f"{rule.api} in {TABLE}/{rule.file}",
        )
        for rule in OPERATORS
    }


def cann() -> tuple[int, ...]:
    return tuple(int(part) for part in os.environ.get("RLXF_SIM_CANN", "8.5").split(".")[:2])


def checked_attention(attention: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(attention)
    def wrapper(
        query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, *more: Any,
        **keywords: Any,
    ) -> Any:  # fmt: skip
        if attn_mask is not None and query.device.type == "npu" and cann() < MASKS_EXPANDED:
            check_mask(query, key, attn_mask)
        return attention(query, key, value, attn_mask, *more, **keywords)

    return wrapper


def check_mask(query: Tensor, key: Tensor, mask: Tensor) -> None:
    """Raise RuntimeError for a bool mask of another shape than BNSS, B1SS, 11SS or SS."""
    if mask.dtype is not torch.bool or query.dim() != 4:
        return
    batch, heads, scores = query.size(0), query.size(1), (query.size(2), key.size(2))
    known = {(batch, heads, *scores), (batch, 1, *scores), (1, 1, *scores), scores}
    if tuple(mask.shape) not in known:
        raise RuntimeError(
            f"get unsupported atten_mask shape, the shape is {tuple(mask.shape)}. B=[{batch}], "
            f"N=[{heads}], Sq=[{scores[0]}], Skv=[{scores[1]}]: before CANN 9.1 a mask has a row "
            f"for each query ({MASK_SOURCE})"
        )
