"""Log-probs, entropies and logits from the last stage's hidden states.

Axes: tokens = a micro-batch's response tokens, vocab = this rank's vocabulary shard. Logits exist
for `CHUNK_TOKENS` tokens at a time and are recomputed in backward, so a whole micro-batch's
[tokens, vocab] never exists. The weight gradient accumulates over chunks in fp32.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

CHUNK_TOKENS = 1024

Linear = Callable[[Tensor, Tensor], Tensor]
"""Multiplies hidden states [tokens, hidden] by weights [vocab, hidden]."""


def fp32_linear(hidden: Tensor, weight: Tensor) -> Tensor:
    """Multiply like `F.linear`, with an fp32 result of bf16 inputs.

    `F.linear` rounds logits to bf16: by up to 1/16 for those between 16 and 32. In backward the
    logits' gradient is rounded to the inputs' dtype, as `F.linear` has it.
    """
    if hidden.dtype is torch.float32:
        return F.linear(hidden, weight)
    product: Tensor = _Fp32Product.apply(hidden, weight)
    return product


class _Fp32Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(hidden, weight)
        if _multiplies_into_fp32(hidden.device.type, hidden.dtype):
            return torch.mm(hidden, weight.t(), out_dtype=torch.float32)
        return F.linear(hidden.float(), weight.float())

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None]:
        hidden, weight = ctx.saved_tensors
        needs_hidden, needs_weight = ctx.needs_input_grad
        grad = grad.to(hidden.dtype)
        return (
            grad @ weight if needs_hidden else None,
            grad.t() @ hidden if needs_weight else None,
        )


@functools.cache
def _multiplies_into_fp32(kind: str, dtype: torch.dtype) -> bool:
    """Return whether torch adds up products of this dtype into an fp32 result, by trying it."""
    one = torch.ones(16, 16, dtype=dtype, device=kind)
    try:
        torch.mm(one, one, out_dtype=torch.float32)
    except (TypeError, RuntimeError):  # older torch, or no kernel of this device
        return False
    return True


def token_log_probs(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    vocab_size: int,
    tp_group: dist.ProcessGroup,
    temperature: float = 1.0,
    linear: Linear = F.linear,
    with_entropy: bool = True,
) -> tuple[Tensor, Tensor]:
    """Compute each label's log-prob, and each token's entropy.

    A collective over the tensor-parallel ranks. Large inputs go in chunks, recomputed in backward.

    Args:
        hidden: [tokens, hidden], equal on every tensor-parallel rank; its gradient is this rank's
            part, to be summed over the ranks by the caller.
        weight: [vocab, hidden], this rank's output layer rows.
        labels: [tokens] int64, token ids in the whole vocabulary.
        vocab_size: ids from here on are padding with probability 0.
        tp_group: tensor-parallel group.
        temperature: divides the logits.
        linear: as in `shard_logits`.
        with_entropy: False leaves out what only the entropy needs.

    Returns:
        Log-probs and entropies, [tokens] fp32 each, equal on every rank. Without entropy the latter
        are [0].
    """
    settings = _Settings(vocab_size, tp_group, temperature, linear, with_entropy)
    if not (torch.is_grad_enabled() and (hidden.requires_grad or weight.requires_grad)):
        softmax = _chunked_softmax(hidden, weight, labels, settings)
        return softmax.log_probs, softmax.entropy
    if hidden.size(0) <= CHUNK_TOKENS:
        logits = linear(hidden, weight)
        values, entropy = _LogProbsOfLogits.apply(logits, labels, settings)
    else:
        values, entropy = _ChunkedLogProbs.apply(hidden, weight, labels, settings)
    return values, entropy


class _Settings(NamedTuple):
    """The arguments of `token_log_probs` besides tensors."""

    vocab_size: int
    group: dist.ProcessGroup
    temperature: float
    linear: Linear
    with_entropy: bool


class _Softmax(NamedTuple):
    """The softmax of each token's logits, over the whole vocabulary, [tokens] each."""

    log_probs: Tensor  # at the labels
    entropy: Tensor  # [0] without
    maximum: Tensor  # largest logit
    normaliser: Tensor  # sum of exp(logit - maximum)


def _scaled_logits(logits: Tensor, settings: _Settings) -> Tensor:
    """Return fp32 logits over temperature [tokens, vocab], hardly above -inf at padding ids.

    Detached. Overwrites fp32 logits, so that a chunk is not there twice: a product does not need
    its result in backward.
    """
    logits = logits.detach()
    is_scaled = settings.temperature != 1.0
    if logits.dtype is not torch.float32 and is_scaled:
        # One kernel converts and divides: its second argument is fp32, and no scalar.
        logits = logits / torch.full((1,), settings.temperature, device=logits.device)
    else:
        logits = logits.float()
        if is_scaled:
            logits.div_(settings.temperature)
    num_real = _num_real(logits.size(-1), settings.vocab_size, settings.group)
    # A finite number times its probability 0 is 0 in the entropy.
    logits[:, num_real:] = torch.finfo(logits.dtype).min
    return logits


def _softmax(logits: Tensor, labels: Tensor, settings: _Settings) -> tuple[_Softmax, Tensor]:
    """Compute the softmax from this rank's scaled logits, which it overwrites.

    A collective over the tensor-parallel ranks. Also returns exp(logit - maximum), [tokens, vocab].
    """
    maximum = logits.amax(dim=-1)
    _all_reduce(maximum, settings.group, dist.ReduceOp.MAX)
    shifted = logits.sub_(maximum[:, None])
    local, is_local = _local_labels(labels, logits.size(-1), settings.group)
    at_label = shifted.gather(-1, local[:, None]).squeeze(-1).masked_fill(~is_local, 0.0)
    # Sums that every rank contributes to, in one message: normaliser, label, p * logit.
    if settings.with_entropy:
        exponentials = shifted.exp()
        weighted = shifted.mul_(exponentials).sum(-1)
        sums = torch.stack((exponentials.sum(-1), at_label, weighted))
    else:
        exponentials = shifted.exp_()
        sums = torch.stack((exponentials.sum(-1), at_label))
    _all_reduce(sums, settings.group, dist.ReduceOp.SUM)
    normaliser = sums[0]
    log_normaliser = normaliser.log()
    entropy = sums.new_empty(0)
    if settings.with_entropy:
        entropy = log_normaliser - sums[2] / normaliser
    return _Softmax(sums[1] - log_normaliser, entropy, maximum, normaliser), exponentials


def _local_labels(labels: Tensor, num_rows: int, group: dist.ProcessGroup) -> tuple[Tensor, Tensor]:
    """Return each label's column in this rank's shard, and whether it is there, [tokens] each."""
    local = labels - group.rank() * num_rows
    is_local = (local >= 0) & (local < num_rows)
    return local.clamp(0, num_rows - 1), is_local


def _chunked_softmax(
    hidden: Tensor, weight: Tensor, labels: Tensor, settings: _Settings
) -> _Softmax:
    """Compute the softmax of all tokens by chunks, without a gradient; keep no logits."""
    chunks = []
    with torch.no_grad():
        for start in range(0, max(1, hidden.size(0)), CHUNK_TOKENS):
            chunk = slice(start, start + CHUNK_TOKENS)
            logits = _scaled_logits(settings.linear(hidden[chunk], weight), settings)
            chunks.append(_softmax(logits, labels[chunk], settings)[0])
            del logits  # before the next chunk has its own
    return chunks[0] if len(chunks) == 1 else _Softmax(*map(torch.cat, zip(*chunks, strict=True)))


def _logits_gradient(
    probabilities: Tensor,
    labels: Tensor,
    settings: _Settings,
    grad: Tensor | None,
    entropy: Tensor,
    entropy_grad: Tensor | None,
) -> Tensor:
    """Return the gradient for this rank's logits [tokens, vocab], before the temperature.

    d log p(label) / d logit = [label] - p; d entropy / d logit = -p (log p + entropy). Without
    `entropy_grad` it overwrites the probabilities.
    """
    local, is_local = _local_labels(labels, probabilities.size(-1), settings.group)
    if grad is None:
        grad = torch.zeros_like(entropy)
    if entropy_grad is None:
        grad_logits = probabilities.mul_(-grad[:, None])
    else:
        grad_logits = probabilities.mul(-grad[:, None])
    grad_logits.scatter_add_(-1, local[:, None], (grad * is_local)[:, None])
    if entropy_grad is not None:
        slope = torch.xlogy(probabilities, probabilities)
        slope += probabilities * entropy[:, None]
        slope *= entropy_grad[:, None]  # in place: the plan counts four arrays of this size
        grad_logits -= slope
    if settings.temperature != 1.0:
        grad_logits.div_(settings.temperature)
    return grad_logits


class _LogProbsOfLogits(torch.autograd.Function):
    """Log-softmax at the labels, and entropy, with the vocabulary split over tp ranks."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, labels: Tensor, settings: _Settings) -> Any:
        """Compute log-probs and entropies [tokens] from this rank's logits [tokens, vocab]."""
        dtype = logits.dtype
        softmax, exponentials = _softmax(_scaled_logits(logits, settings), labels, settings)
        probabilities = exponentials.div_(softmax.normaliser[:, None])
        ctx.save_for_backward(probabilities, labels, softmax.entropy)
        ctx.settings = settings
        ctx.dtype = dtype
        ctx.set_materialize_grads(False)
        return softmax.log_probs, softmax.entropy

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None, entropy_grad: Tensor | None) -> Any:
        """Return the gradient for this rank's logits."""
        probabilities, labels, entropy = ctx.saved_tensors
        grad_logits = _logits_gradient(
            probabilities, labels, ctx.settings, grad, entropy, entropy_grad
        )
        return grad_logits.to(ctx.dtype), None, None


class _ChunkedLogProbs(torch.autograd.Function):
    """Log-probs and entropies chunk by chunk, whose logits are recomputed in backward."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, labels: Tensor, settings: _Settings
    ) -> tuple[Tensor, Tensor]:
        """Compute log-probs and entropies, [tokens] each, by chunks; keep no logits."""
        softmax = _chunked_softmax(hidden, weight, labels, settings)
        log_probs, entropy, maximum, normaliser = softmax
        ctx.save_for_backward(hidden, weight, labels, entropy, maximum, normaliser)
        ctx.settings = settings
        ctx.set_materialize_grads(False)
        return log_probs, entropy

    @staticmethod
    def backward(
        ctx: Any, grad: Tensor | None, entropy_grad: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        """Recompute each chunk; return gradients for hidden states and weight, if needed.

        The weight's is summed over chunks in fp32, or added to `main_grad` (`_WeightGradient`).
        """
        hidden, weight, labels, entropy, maximum, normaliser = ctx.saved_tensors
        settings = ctx.settings
        needs_hidden, needs_weight = ctx.needs_input_grad[:2]
        weight_sum = _WeightGradient(weight)
        hidden_grads: list[Tensor] = []
        for start in reversed(range(0, hidden.size(0), CHUNK_TOKENS)):
            chunk = slice(start, start + CHUNK_TOKENS)
            with torch.enable_grad():
                chunk_hidden = hidden[chunk].detach().requires_grad_(needs_hidden)
                chunk_weight = weight.detach().requires_grad_(needs_weight)
                logits = settings.linear(chunk_hidden, chunk_weight)
            exponentials = _scaled_logits(logits, settings).sub_(maximum[chunk, None]).exp_()
            grad_logits = _logits_gradient(
                exponentials.div_(normaliser[chunk, None]),
                labels[chunk],
                settings,
                None if grad is None else grad[chunk],
                entropy[chunk],
                None if entropy_grad is None else entropy_grad[chunk],
            )
            inputs = [x for x in (chunk_hidden, chunk_weight) if x.requires_grad]
            gradients = iter(torch.autograd.grad(logits, inputs, grad_logits.to(logits.dtype)))
            if needs_hidden:
                hidden_grads.append(next(gradients))
            if needs_weight:
                weight_sum.add(next(gradients))
            del logits, exponentials, grad_logits  # before the next chunk has its own
        hidden_grad = torch.cat(hidden_grads[::-1]) if needs_hidden else None
        return hidden_grad, weight_sum.result(), None, None


class _WeightGradient:
    """Sums a weight's gradients over chunks, in fp32 if the weight is bf16 or fp16.

    Under Megatron's data parallelism such a weight may have an fp32 gradient buffer (`main_grad`):
    the sum is added to it, and autograd gets no gradient. Megatron's hook still runs once and adds
    autograd's gradient from elsewhere, as for a tied embedding. (With `grad_added_to_main_grad` the
    hook would drop that one, except for weights marked with `zero_out_wgrad`.) With
    `overlap_grad_reduce` the hook refuses a weight without a gradient; the weight has
    `reduced_early`, and autograd gets the rounded sum.
    """

    def __init__(self, weight: Tensor) -> None:
        self._dtype = weight.dtype
        self._main_grad: Tensor | None = None
        is_narrow = torch.finfo(weight.dtype).bits < 32
        if is_narrow and not getattr(weight, "reduced_early", False):
            main_grad = getattr(weight, "main_grad", None)
            if main_grad is not None and main_grad.dtype is torch.float32:
                self._main_grad = main_grad
        self._sum: Tensor | None = None

    def add(self, gradient: Tensor) -> None:
        """Add a chunk's gradient to Megatron's buffer if there is one, else to an fp32 sum."""
        if self._main_grad is not None:
            self._main_grad.add_(gradient)
        elif self._sum is None:
            self._sum = gradient.to(torch.promote_types(self._dtype, torch.float32))
        else:
            self._sum.add_(gradient)

    def result(self) -> Tensor | None:
        """Return the sum for autograd, in the weight's dtype."""
        return None if self._sum is None else self._sum.to(self._dtype)


def shard_logits(
    hidden: Tensor,
    weight: Tensor,
    vocab_size: int,
    tp_group: dist.ProcessGroup,
    linear: Linear = F.linear,
) -> Tensor:
    """Compute logits for this rank's vocabulary shard, [tokens, vocab] fp32.

    They are -inf at padding ids, `vocab_size` and above. `linear` multiplies `hidden` by `weight`,
    this rank's rows [vocab, hidden].
    """
    logits = linear(hidden, weight).float()
    num_rows = weight.size(0)
    num_real = _num_real(num_rows, vocab_size, tp_group)
    if num_real < num_rows:
        padding = torch.arange(num_rows, device=logits.device) >= num_real
        logits = logits.masked_fill(padding, float("-inf"))
    return logits


def _num_real(num_rows: int, vocab_size: int, group: dist.ProcessGroup) -> int:
    """Return how many of this rank's rows are no padding."""
    return max(0, min(num_rows, vocab_size - group.rank() * num_rows))


def full_logits(
    hidden: Tensor,
    weight: Tensor,
    vocab_size: int,
    tp_group: dist.ProcessGroup,
    linear: Linear = F.linear,
) -> Tensor:
    """Gather logits for the whole vocabulary, [tokens, vocab_size] fp32, on every tp rank.

    A collective over the tensor-parallel ranks, without a gradient if there are several; `linear`
    as in `shard_logits`.
    """
    logits = shard_logits(hidden, weight, vocab_size, tp_group, linear)
    if tp_group.size() > 1:
        shards = [torch.empty_like(logits) for _ in range(tp_group.size())]
        dist.all_gather(shards, logits.contiguous(), group=tp_group)
        logits = torch.cat(shards, dim=-1)
    return logits if logits.size(1) == vocab_size else logits[:, :vocab_size]


def first_rank_logits(
    hidden: Tensor,
    weight: Tensor,
    vocab_size: int,
    tp_group: dist.ProcessGroup,
    linear: Linear = F.linear,
) -> Tensor | None:
    """Gather logits as `full_logits` on the group's first rank; None on the others.

    A collective over the tensor-parallel ranks, of which each sends its shard once.
    """
    logits = shard_logits(hidden, weight, vocab_size, tp_group, linear).contiguous()
    first = dist.get_global_rank(tp_group, 0)
    if tp_group.rank() > 0:
        dist.gather(logits, None, first, group=tp_group)
        return None
    shards = [torch.empty_like(logits) for _ in range(tp_group.size())]
    dist.gather(logits, shards, first, group=tp_group)
    return torch.cat(shards, dim=-1)[:, :vocab_size]


@torch.no_grad()
def full_kl(
    hidden: Tensor,
    weight: Tensor,
    other_hidden: Tensor,
    other_weight: Tensor,
    vocab_size: int,
    tp_group: dist.ProcessGroup,
    temperature: float = 1.0,
    linear: Linear = F.linear,
) -> Tensor:
    """Compute KL(p || q) = sum over the vocabulary of p (log p - log q), for each token.

    A collective over the tensor-parallel ranks, without a gradient.

    Args:
        hidden: p's hidden states [tokens, hidden].
        weight: p's rows on this rank [vocab, hidden].
        other_hidden: q's hidden states.
        other_weight: q's rows on this rank.
        vocab_size: ids from here on are padding.
        tp_group: tensor-parallel group.
        temperature: divides all logits.
        linear: as in `shard_logits`.

    Returns:
        [tokens] fp32, equal on every rank.
    """
    kl_chunks = []
    chunk = max(1, CHUNK_TOKENS // 2)  # two distributions at a time
    for p_hidden, q_hidden in zip(hidden.split(chunk), other_hidden.split(chunk), strict=True):
        settings = vocab_size, tp_group, temperature, linear
        log_p = _log_softmax(p_hidden, weight, *settings)
        log_q = _log_softmax(q_hidden, other_weight, *settings)
        kl = torch.where(log_p != -torch.inf, log_p.exp() * (log_p - log_q), 0.0).sum(-1)
        _all_reduce(kl, tp_group, dist.ReduceOp.SUM)
        kl_chunks.append(kl)
    return torch.cat(kl_chunks)


def _log_softmax(
    hidden: Tensor,
    weight: Tensor,
    vocab_size: int,
    group: dist.ProcessGroup,
    temperature: float,
    linear: Linear,
) -> Tensor:
    """Compute log-probs for this rank's vocabulary shard, [tokens, vocab] fp32.

    Normalised over the whole vocabulary, by a collective; -inf at padding ids.
    """
    logits = shard_logits(hidden, weight, vocab_size, group, linear)
    if temperature != 1.0:
        logits.div_(temperature)
    maximum = logits.amax(dim=-1)
    _all_reduce(maximum, group, dist.ReduceOp.MAX)
    shifted = logits.sub_(maximum[:, None])
    total = shifted.exp().sum(-1)
    _all_reduce(total, group, dist.ReduceOp.SUM)
    return shifted.sub_(total.log()[:, None])


def _all_reduce(tensor: Tensor, group: dist.ProcessGroup, op: Any) -> None:
    if group.size() > 1:
        dist.all_reduce(tensor, op=op, group=group)
