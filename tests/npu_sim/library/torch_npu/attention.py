"""Fused attention of torch_npu, computed in plain torch after its documented semantics.

Axes as in its documentation: B batch, N heads, S sequence, D head_dim, T all tokens, H = N * D.
A mask is True where a score does NOT count.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

COMPRESSED = (2048, 2048)  # shape of the mask that causal modes take: strictly upper triangular
MAX_SEQUENCES = 1024  # in one packed call
MAX_HEAD_DIM = 768
# Values of sparse_mode: a window, no rule but the mask, causal from the first token or to the last.
DEFAULT, ALL, LEFT_UP, RIGHT_DOWN = 0, 1, 2, 3


def npu_fusion_attention(
    query: Tensor, key: Tensor, value: Tensor, head_num: int, input_layout: str,
    pse: Tensor | None = None, padding_mask: Tensor | None = None,
    atten_mask: Tensor | None = None, scale: float = 1.0, keep_prob: float = 1.0,
    pre_tockens: int = 2147483647, next_tockens: int = 2147483647, inner_precise: int = 0,
    prefix: Sequence[int] | None = None, actual_seq_qlen: Sequence[int] | None = None,
    actual_seq_kvlen: Sequence[int] | None = None, sparse_mode: int = 0,
    gen_mask_parallel: bool = True, sync: bool = False, softmax_layout: str = "",
    sink: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, int, int, int]:  # fmt: skip
    """Return softmax(scale * query key^T, masked) value, in the layout of the inputs.

    actual_seq_qlen, actual_seq_kvlen: for TND, cumulative lengths WITHOUT a leading 0
    Returns (attention, softmax maximum, softmax sum, unused, seed, offset, mask length). Maximum
    and sum are [..., 8]; the last axis repeats one number, as on the device. Raises
    NotImplementedError for options that are not computed here.
    """
    _require(pse is None and padding_mask is None and prefix is None, "pse, padding_mask, prefix")
    _require(keep_prob == 1.0, f"dropout (keep_prob={keep_prob})")
    _require(not softmax_layout and sink is None, "softmax_layout, sink")
    _require(query.dtype == key.dtype == value.dtype, "inputs of several types")
    mask_of = _Mask(atten_mask, sparse_mode, pre_tockens, next_tockens, input_layout)
    if input_layout == "TND":
        out, high, total = _packed(
            query, key, value, head_num, scale, actual_seq_qlen, actual_seq_kvlen, mask_of
        )
    else:
        parts = [_as_bnsd(x, input_layout, head_num, query) for x in (query, key, value)]
        out, high, total = _attend(*parts, scale, mask_of(parts[0].size(2), parts[1].size(2)))
        out = _from_bnsd(out, input_layout)
        high, total = (x[..., None].expand(*x.shape, 8) for x in (high, total))
    return out, high, total, query.new_empty(0), 0, 0, 0


def npu_fusion_attention_grad(
    query: Tensor, key: Tensor, value: Tensor, dy: Tensor, head_num: int, input_layout: str, *,
    pse: Tensor | None = None, padding_mask: Tensor | None = None,
    atten_mask: Tensor | None = None, softmax_max: Tensor | None = None,
    softmax_sum: Tensor | None = None, softmax_in: Tensor | None = None,
    attention_in: Tensor | None = None, scale_value: float = 1.0, keep_prob: float = 1.0,
    pre_tockens: int = 2147483647, next_tockens: int = 2147483647, inner_precise: int = 0,
    seed: int = 0, offset: int = 0, numels: int = 0, prefix: Sequence[int] | None = None,
    actual_seq_qlen: Sequence[int] | None = None, actual_seq_kvlen: Sequence[int] | None = None,
    sparse_mode: int = 0, gen_mask_parallel: bool = True, sync: bool = False,
    softmax_layout: str = "", sink: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, None, None]:  # fmt: skip
    """Return the gradients of query, key and value, and None for those of pse and sink.

    The forward pass is computed again; the given statistics are not used.
    """
    with torch.enable_grad():
        inputs = [x.detach().requires_grad_() for x in (query, key, value)]
        out = npu_fusion_attention(
            *inputs, head_num, input_layout, pse, padding_mask, atten_mask, scale_value, keep_prob,
            pre_tockens, next_tockens, inner_precise, prefix, actual_seq_qlen, actual_seq_kvlen,
            sparse_mode, gen_mask_parallel, sync, softmax_layout, sink,
        )[0]  # fmt: skip
    dq, dk, dv = torch.autograd.grad(out, inputs, dy)
    return dq, dk, dv, None, None


def _require(supported: bool, what: str) -> None:
    if not supported:
        raise NotImplementedError(f"the simulated npu_fusion_attention does not do {what}")


class _Mask:
    """Makes the mask of one sequence from the arguments of the operator, and checks these."""

    def __init__(
        self, mask: Tensor | None, sparse_mode: int, before: int, after: int, layout: str
    ) -> None:
        _require(sparse_mode in (DEFAULT, ALL, LEFT_UP, RIGHT_DOWN), f"sparse_mode={sparse_mode}")
        if mask is not None:
            assert mask.dtype in (torch.bool, torch.uint8), f"a mask of {mask.dtype}"
            assert layout != "TND" or mask.dim() == 2, "a mask of packed sequences must have 2 axes"
            mask = mask.bool()
        if sparse_mode in (LEFT_UP, RIGHT_DOWN) and mask is not None:
            assert mask.shape == COMPRESSED, f"a causal mode needs a mask of {COMPRESSED}"
            wanted = torch.ones(COMPRESSED, dtype=torch.bool, device=mask.device).triu(1)
            assert torch.equal(mask, wanted), "a compressed mask must be True above the diagonal"
        self._mask, self._mode, self._before, self._after = mask, sparse_mode, before, after

    def __call__(self, queries: int, keys: int) -> Tensor | None:
        """Return a mask [..., queries, keys], True where a score does not count; None = no mask."""
        if self._mask is None:  # modes and windows have no effect without a mask
            return None
        if self._mode in (LEFT_UP, RIGHT_DOWN):
            shift = keys - queries if self._mode == RIGHT_DOWN else 0
            everything = torch.ones(queries, keys, dtype=torch.bool, device=self._mask.device)
            return everything.triu(1 + shift)
        mask = self._mask[..., :queries, :keys]
        assert mask.shape[-2:] == (queries, keys), "the mask is smaller than the scores"
        if self._mode == DEFAULT:
            places = torch.arange(max(queries, keys), device=mask.device)
            distance = places[None, :keys] - places[:queries, None]
            outside = (distance > self._after) | (distance < -self._before)
            assert (mask | ~outside).all(), "the mask must exclude all that the window excludes"
        return mask


def _attend(
    query: Tensor, key: Tensor, value: Tensor, scale: float, mask: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute the attention of query [B, N, S, D]; key and value may have fewer heads.

    mask: True where a score does not count. Returns out, and softmax maximum and sum [B, N, S].
    """
    heads, groups = query.size(1), key.size(1)
    assert heads % groups == 0, f"{heads} query heads must be a multiple of {groups} key heads"
    assert 1 <= query.size(-1) <= MAX_HEAD_DIM, f"head_dim {query.size(-1)}"
    key, value = (x.repeat_interleave(heads // groups, dim=1) for x in (key, value))
    precise = torch.promote_types(query.dtype, torch.float32)
    scores = query.to(precise) @ key.to(precise).transpose(-1, -2) * scale
    if mask is not None:
        assert not mask.all(-1).any(), "a query whose every key is masked"
        scores = scores.masked_fill(mask, float("-inf"))
    high = scores.amax(-1).detach()
    weights = (scores - high[..., None]).exp()
    total = weights.sum(-1)
    out = (weights / total[..., None]) @ value.to(precise)
    return out.to(query.dtype), high, total.detach()


def _packed(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    head_num: int,
    scale: float,
    query_ends: Sequence[int] | None,
    key_ends: Sequence[int] | None,
    mask_of: _Mask,
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute the attention of tensors [T, N, D] sequence by sequence; ends: cumulative lengths."""
    assert query_ends is not None and key_ends is not None, "TND needs actual_seq_qlen and _kvlen"
    assert all(isinstance(end, int) for end in (*query_ends, *key_ends)), "lengths must be ints"
    assert len(query_ends) == len(key_ends) <= MAX_SEQUENCES, "at most 1024 sequences"
    assert query.dim() == 3 and query.size(1) == head_num, "query must be [T, N, D]"
    assert query_ends[0] > 0, "cumulative lengths must not begin with 0"
    assert query_ends[-1] == query.size(0) and key_ends[-1] == key.size(0), "lengths must sum to T"
    parts = []
    for lengths in zip(_spans(query_ends), _spans(key_ends), strict=True):
        (q0, q1), (k0, k1) = lengths
        assert q0 <= q1 and k0 <= k1, "cumulative lengths must not fall"
        sequence = (query[q0:q1], key[k0:k1], value[k0:k1])
        rows = [x.transpose(0, 1)[None] for x in sequence]
        parts.append(_attend(*rows, scale, mask_of(q1 - q0, k1 - k0)))
    out = torch.cat([part[0][0].transpose(0, 1) for part in parts])
    high, total = (
        torch.cat([part[i][0].transpose(0, 1) for part in parts])[..., None].repeat(1, 1, 8)
        for i in (1, 2)
    )
    return out, high, total


def _spans(ends: Sequence[int]) -> list[tuple[int, int]]:
    return list(zip([0, *ends[:-1]], ends, strict=True))


def _as_bnsd(x: Tensor, layout: str, head_num: int, query: Tensor) -> Tensor:
    """Turn a tensor of a layout into [B, N, S, D]; D follows from the query."""
    if layout == "BNSD":
        return x
    if layout == "BSND":
        return x.transpose(1, 2)
    assert layout in ("BSH", "SBH"), f"input_layout={layout}"
    head_dim = query.size(-1) // head_num
    x = x.unflatten(-1, (-1, head_dim))
    return x.permute(0, 2, 1, 3) if layout == "BSH" else x.permute(1, 2, 0, 3)


def _from_bnsd(x: Tensor, layout: str) -> Tensor:
    if layout == "BNSD":
        return x
    if layout == "BSND":
        return x.transpose(1, 2)
    return (x.permute(0, 2, 1, 3) if layout == "BSH" else x.permute(2, 0, 1, 3)).flatten(2)
