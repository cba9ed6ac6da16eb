"""Predicted memory and disk of a run: one function for each row of `docs/memory.md`.

Rows about generation are in `generation_memory.py`.

numbers:  count of scalar parameters on one rank
itemsize: bytes of a weight or an activation (2 in bf16, 4 in fp32)
a:        architecture of the model
tp:       tensor-parallel size
Results are for one rank unless a docstring says otherwise.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import lcm

from mindspeed_rlxf.config.architecture import ArchitectureConfig
from mindspeed_rlxf.config.enums import Recompute, RecomputeMethod
from mindspeed_rlxf.config.roles import LearningConfig, RoleConfig
from mindspeed_rlxf.config.rules.tensor_parallel import groups_per_rank, qkv_rows

FP32 = 4


def itemsize(role: RoleConfig) -> int:
    """Return the bytes of one weight or activation of a role: 2 with bf16, else 4."""
    return 2 if role.bf16 else FP32


def buffer_numbers(sizes: Sequence[int], dp: int, distributed: bool) -> int:
    """Return the length of Megatron's gradient buffer, in numbers: the sum of `sizes`, or padded.

    sizes:       numbers of each parameter
    distributed: with the distributed optimizer each parameter is padded to a multiple of 64, and
                 the length to a multiple of 128 and of `dp`; the weights are in a buffer of this
                 length
    """
    if not distributed:
        return sum(sizes)
    return _round_up(sum(_round_up(size, 64) for size in sizes), lcm(dp, 128))


def _round_up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple


def weight_bytes(numbers: int, itemsize: int) -> int:
    """Return the bytes of weights in the precision of the model."""
    return numbers * itemsize


def gradient_bytes(numbers: int) -> int:
    """Return the bytes of the fp32 buffer that sums gradients; it is never sharded."""
    return numbers * FP32


def optimizer_bytes(numbers: int, itemsize: int, shards: int) -> int:
    """Return the bytes of Adam's two fp32 moments, and of the fp32 copy of bf16 weights.

    shards: ranks that divide the state: DP with the distributed optimizer, else 1
    """
    return numbers // shards * optimizer_number_bytes(itemsize)


def optimizer_number_bytes(itemsize: int) -> int:
    """Return the bytes of Adam's state for one scalar parameter: 8, or 12 for bf16 weights."""
    return (2 if itemsize == FP32 else 3) * FP32


def optimizer_step_bytes(numbers: int, shards: int) -> int:
    """Return the bytes of the square roots of all second moments, a temporary of torch's Adam.

    shards: ranks that divide the optimizer's state
    """
    return numbers // shards * FP32


def layer_activation_bytes(
    a: ArchitectureConfig, tokens: int, tp: int, sequence_parallel: bool, itemsize: int
) -> int:
    """Return the bytes of activations that one layer keeps for its backward pass.

    Of a micro-batch of `tokens`, on one rank: those of two norms (divided by `tp` only with
    `sequence_parallel`), of attention (`_attention_bytes`) and of the MLP or the experts
    (`mlp_activation_bytes`).
    """
    norm = _norm_bytes(a, tokens, tp, sequence_parallel, itemsize)
    attention = _attention_bytes(a, tokens, tp, itemsize)
    return 2 * norm + attention + mlp_activation_bytes(a, tokens, tp, sequence_parallel, itemsize)


def layer_forward_bytes(
    a: ArchitectureConfig, tokens: int, tp: int, sequence_parallel: bool, itemsize: int
) -> int:
    """Return the peak bytes of activations of one layer in a forward pass without gradients.

    The layer's input, one norm, and the larger of attention and MLP: attention's activations are
    freed before the MLP begins.
    """
    norm = _norm_bytes(a, tokens, tp, sequence_parallel, itemsize)
    entry = (tokens // tp if sequence_parallel else tokens) * a.hidden_size * itemsize
    attention = _attention_bytes(a, tokens, tp, itemsize)
    mlp = mlp_activation_bytes(a, tokens, tp, sequence_parallel, itemsize)
    return entry + norm + max(attention, mlp)


def _norm_bytes(
    a: ArchitectureConfig, tokens: int, tp: int, sequence_parallel: bool, itemsize: int
) -> int:
    """Return the bytes that a norm keeps: its input in fp32, the normed value and the output.

    Also one fp32 number per token. With `sequence_parallel` a rank has 1 / tp of the tokens.
    """
    norm_tokens = tokens // tp if sequence_parallel else tokens
    return norm_tokens * ((FP32 + 2 * itemsize) * a.hidden_size + FP32)


def _attention_bytes(a: ArchitectureConfig, tokens: int, tp: int, itemsize: int) -> int:
    """Return the bytes that one layer's attention keeps for the backward pass.

    Projections, rotated queries and keys, cosines and sines, the output twice, and the log of the
    softmax's divisor; with `qk_layernorm` also what these norms keep. Ranks that share a key-value
    group gather the projections of all ranks.
    """
    queries = a.num_attention_heads * a.head_dim // tp
    keys = groups_per_rank(a.kv_heads, tp) * a.head_dim
    projected = qkv_rows(a) if tp > a.kv_heads else queries + 2 * keys
    kept = itemsize * (projected + 3 * queries + keys + 4 * a.head_dim)
    kept += FP32 * a.num_attention_heads // tp
    if a.qk_layernorm:
        kept += (FP32 + itemsize) * (queries + keys)
    return tokens * kept


def mlp_activation_bytes(
    a: ArchitectureConfig, tokens: int, tp: int, sequence_parallel: bool, itemsize: int
) -> int:
    """Return the bytes that one layer's MLP, or its experts, keep for the backward pass.

    The gate and up projection together, the activated gate, the up projection alone, and the
    product of gate and up. Of experts these for each token sent to them (`dispatched_tokens`), its
    hidden state and the product times the router's weight; and the router's probabilities and
    choices. `layer_activation_bytes` includes the result.
    """
    if a.num_experts is None:
        return tokens * 5 * itemsize * a.mlp_hidden_size // tp
    expert = itemsize * (a.hidden_size + 6 * a.mlp_hidden_size // tp)
    routing = 5 * a.num_experts + 12 * a.moe_router_topk
    return dispatched_tokens(a, tokens, tp, sequence_parallel) * expert + tokens * routing


def chunk_activation_bytes(
    role: LearningConfig, layer: int, mlp: int, entry: int
) -> tuple[int, int]:
    """Return (bytes kept for each micro-batch in flight, bytes recomputed at one time) of a chunk.

    layer, mlp, entry: bytes of a layer's activations, of those of its MLP (included in `layer`),
                       and of the hidden states that enter a layer
    Both numbers by `recompute`, for full recomputation by its method:
    none:      all layers; 0
    selective: the layers without their MLPs; one MLP
    uniform:   one entry per group of `recompute_num_layers` layers; the layers of one group
    block:     entries of the first `recompute_num_layers` layers, and the other layers; one layer
               if there are no others, else 0
    """
    layers, size = role.layers_per_chunk, role.recompute_num_layers
    if role.recompute is Recompute.NONE:
        return layers * layer, 0
    if role.recompute is Recompute.SELECTIVE:
        return layers * (layer - mlp), mlp
    if role.recompute_method is RecomputeMethod.UNIFORM:
        return layers // size * entry, size * layer
    # Activations that are kept are of later layers, so they are freed before one is recomputed.
    return size * entry + (layers - size) * layer, layer if size == layers else 0


def dispatched_tokens(a: ArchitectureConfig, tokens: int, tp: int, sequence_parallel: bool) -> int:
    """Count the (token, chosen expert) pairs that a rank's experts compute in a layer; 0 if dense.

    Routing is taken as balanced over the ranks. Without sequence parallel every tensor-parallel
    rank sends all tokens.
    """
    return tokens * (a.moe_router_topk if a.num_experts else 0) * (1 if sequence_parallel else tp)


def dispatch_bytes(
    a: ArchitectureConfig, tokens: int, tp: int, sequence_parallel: bool, itemsize: int
) -> int:
    """Return the bytes of hidden states sent to the experts and back: three copies, 0 if dense.

    A copy has `dispatched_tokens` hidden states.
    """
    dispatched = dispatched_tokens(a, tokens, tp, sequence_parallel)
    return 3 * dispatched * a.hidden_size * itemsize


def micro_batch_tokens(role: RoleConfig, samples: int, length: int) -> int:
    """Return the tokens of a rank's largest micro-batch, of `samples` of up to `length` tokens.

    With `max_tokens_per_micro_batch` at most that; else of `micro_batch_size` samples. Never more
    than all samples have.
    """
    limit = role.max_tokens_per_micro_batch
    if limit is None:
        return min(role.micro_batch_size, samples) * length
    return min(limit, samples * length)


def micro_batches(role: RoleConfig, samples: int, length: int) -> int:
    """Return the number of micro-batches into which a rank divides `samples`, rounded up.

    With `max_tokens_per_micro_batch` it is an upper bound: every micro-batch takes at least
    limit // length samples (at least 1). Then rounded up to a multiple of the stages of a virtual
    pipeline.
    length: tokens of the longest sample
    """
    limit = role.max_tokens_per_micro_batch
    size = role.micro_batch_size if limit is None else max(limit // length, 1)
    return _round_up(-(-samples // size), role.micro_batch_multiple)


def in_flight(pp_rank: int, pp: int, micro_batches: int, chunks: int = 1) -> int:
    """Return the number of forward passes whose activations a pipeline stage holds at once.

    One pass is one micro-batch through one of the stage's `chunks`. It is the number of passes
    before the first backward pass in the 1F1B schedule, interleaved for several chunks, and at most
    `micro_batches` x `chunks`.
    """
    if chunks == 1:
        return min(pp - pp_rank, micro_batches)
    return min(2 * (pp - pp_rank - 1) + (chunks - 1) * pp + 1, micro_batches * chunks)


def stage_transfer_bytes(tokens: int, hidden_size: int, itemsize: int) -> int:
    """Return the bytes of hidden states that a stage receives and sends for a micro-batch."""
    return 2 * tokens * hidden_size * itemsize


def last_hidden_bytes(tokens: int, read: int, hidden_size: int, itemsize: int) -> int:
    """Return the bytes of hidden states between the last layer and the head.

    The final norm's input in fp32, its normed value and output, and a copy of the tokens read.
    read: number of tokens whose log-prob or value is computed
    """
    return hidden_size * (tokens * (FP32 + 2 * itemsize) + read * itemsize)


def log_prob_head_bytes(tokens: int, vocab: int, chunk: int) -> int:
    """Return the bytes to compute log-probs of one chunk of tokens from hidden states.

    Logits, shifted logits, exponentials and a product, in fp32.
    tokens: whose log-probs are computed
    vocab:  rows of the output layer on this rank
    chunk:  tokens computed at one time
    """
    return 4 * FP32 * min(tokens, chunk) * vocab


def score_head_bytes(tokens: int, hidden_size: int) -> int:
    """Return the bytes of the fp32 copy of hidden states that a value or score head reads."""
    return FP32 * tokens * hidden_size


def weight_gradient_bytes(
    shared: Sequence[int], experts: Sequence[int], together: int, itemsize: int
) -> int:
    """Return the bytes of the largest weight gradient before it is added to the gradient buffer.

    shared:   numbers of each parameter outside the experts
    experts:  numbers of each parameter of an expert
    together: experts of a layer on a rank, whose gradients one product computes
    """
    return max(max(shared, default=0), together * max(experts, default=0)) * itemsize


def head_gradient_bytes(vocab: int, hidden: int) -> int:
    """Return the bytes of the fp32 buffer that sums the output layer's gradient over chunks.

    vocab: rows of the output layer on this rank
    """
    return FP32 * vocab * hidden


def gather_buffer_bytes(tokens: int, hidden_size: int, itemsize: int) -> int:
    """Return the bytes of Megatron's permanent buffer for gathers of sequence parallel."""
    return tokens * hidden_size * itemsize


def communicators(
    tp: int, pp: int, dp: int, trains: bool, generates: bool, ep: int = 1, experts: bool = False
) -> int:
    """Return how many process groups of more than one rank a rank of the role belongs to.

    Each has buffers on the device. They are:
    always TP, PP, DP; if the role trains, TP x PP; if it generates, another TP;
    with experts TP, EP and TP x EP of the experts, and if it generates, another TP and EP;
    with experts, training and EP > 1, one for sums and one of the dp / ep ranks with equal experts.
    trains, generates: whether the role does so
    """
    model = trains and tp * pp > 1  # sums the gradient norm
    dense = sum((tp > 1, pp > 1, dp > 1, model, generates and tp > 1))
    if not experts:
        return dense
    sums = trains and ep > 1
    training = sum((tp > 1, ep > 1, tp * ep > 1, sums and dp > ep, sums))
    return dense + training + (sum((tp > 1, ep > 1)) if generates else 0)


def sample_bytes(prompt: int, response: int) -> int:
    """Return the host memory in bytes of one sample's data, over all roles (`data.batch`).

    Per prompt token 8 for the id. Per response token 50: id 8; fp32 values of rollout, actor and
    reference log-probs, KL, value; and of advantage, old and reference log-prob, return, value;
    two masks of 1. Three arrays and a mask have one slot more. Lengths, id, flag, score: 29.
    """
    return 8 * prompt + 50 * response + 3 * 4 + 1 + 29


def store_bytes(samples: int, sample_bytes: int) -> int:
    """Return the host bytes of the samples of two iterations.

    Those of the last iteration are kept until the next ones replace them.
    samples: of one iteration
    """
    return 2 * samples * sample_bytes


def driver_bytes(process: int, samples: int, prompt: int) -> int:
    """Return the host bytes of the driver: `process` bytes and an iteration's prompt ids."""
    return process + 8 * samples * prompt


def export_bytes(numbers: int, itemsize: int, stored_itemsize: int) -> int:
    """Return the disk bytes of a role's final weights, saved in both formats.

    numbers:         of the whole model
    itemsize:        bytes of a weight in the Megatron folder
    stored_itemsize: in the Hugging Face folder, as in the folder that was loaded
    """
    return numbers * (stored_itemsize + itemsize)


def checkpoint_bytes(numbers: int, itemsize: int) -> int:
    """Return the disk bytes of one checkpoint of a role: weights and optimizer state.

    numbers: of the whole model
    """
    return numbers * (itemsize + optimizer_number_bytes(itemsize))
