"""Bytes that each part of a run takes: one function for each row of `docs/memory.md`.

`numbers` are parameters that one rank holds, `itemsize` the bytes of a weight or an activation (2
in bf16, 4 in fp32). Results are bytes on one rank unless a docstring says otherwise.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import lcm

from mindspeed_rlxf.config.architecture import ArchitectureConfig
from mindspeed_rlxf.config.enums import Recompute, RecomputeMethod
from mindspeed_rlxf.config.roles import LearningConfig, RoleConfig
from mindspeed_rlxf.config.rules.tensor_parallel import groups_per_rank, qkv_rows

FP32 = 4
CACHE_SHARE = 0.3  # of a device's memory, for the KV cache where the number of rows is left open
PREFILL_TOKENS = 16384  # tokens of one prefill pass at most (one row at least)
EXCHANGE_TOKENS = 4096  # that the ranks of an expert-parallel group exchange at once, together
PAGE = 64  # tokens by which the KV cache of a row grows
GROWTH = 2 * PAGE  # tokens that a row has room for when it enters a cache of limited size


def itemsize(role: RoleConfig) -> int:
    """Bytes of one weight or activation of a role."""
    return 2 if role.bf16 else FP32


def buffer_numbers(sizes: Sequence[int], dp: int, distributed: bool) -> int:
    """Return the size of Megatron's gradient buffer, in numbers (`sizes`: of each parameter).

    The distributed optimizer starts each parameter at a multiple of 64 and cuts the whole in `dp`
    equal parts, a multiple of 128; its weights lie in a buffer of the same size.
    """
    if not distributed:
        return sum(sizes)
    return _filled(sum(_filled(size, 64) for size in sizes), lcm(dp, 128))


def _filled(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple


def weight_bytes(numbers: int, itemsize: int) -> int:
    """Return the bytes of weights in the precision of the model."""
    return numbers * itemsize


def gradient_bytes(numbers: int) -> int:
    """Return the bytes of the fp32 buffer that sums gradients; it is never sharded."""
    return numbers * FP32


def optimizer_bytes(numbers: int, itemsize: int, shards: int) -> int:
    """Return the bytes of Adam's two fp32 moments, and of the fp32 copy of weights that are bf16.

    shards: ranks that share it, DP with the distributed optimizer, else 1.
    """
    return numbers // shards * optimizer_number_bytes(itemsize)


def optimizer_number_bytes(itemsize: int) -> int:
    """Return the bytes of the optimizer's state for one parameter."""
    return (2 if itemsize == FP32 else 3) * FP32


def optimizer_step_bytes(numbers: int, shards: int) -> int:
    """Return the bytes of all second moments' square roots, which torch's Adam holds at once."""
    return numbers // shards * FP32


def layer_activation_bytes(
    a: ArchitectureConfig, tokens: int, tp: int, sequence_parallel: bool, itemsize: int
) -> int:
    """Return the bytes of activations that one layer keeps for its backward pass.

    What is kept:
    - by each of two norms: its input in fp32, the normed value and the output
    - by attention: its projections, the rotated queries and keys, cosines and sines, the output
      twice, and the log of the normaliser. Ranks that share a key-value group gather the
      projections of all ranks
    - by the gated MLP: its two halves together, the activated half, the other half, their product
    - by experts: the same for each token sent to them, its hidden state, and the product times
      its weight
    - by the router: its probabilities and choices
    """
    norm = _norm_bytes(a, tokens, tp, sequence_parallel, itemsize)
    attention = _attention_bytes(a, tokens, tp, itemsize)
    return 2 * norm + attention + mlp_activation_bytes(a, tokens, tp, sequence_parallel, itemsize)


def layer_forward_bytes(
    a: ArchitectureConfig, tokens: int, tp: int, sequence_parallel: bool, itemsize: int
) -> int:
    """Return the most bytes of activations that one layer takes at once without gradients.

    These are the layer's input, a norm, and the larger of attention and MLP, because activations of
    attention are freed before the MLP begins.
    """
    norm = _norm_bytes(a, tokens, tp, sequence_parallel, itemsize)
    entry = (tokens // tp if sequence_parallel else tokens) * a.hidden_size * itemsize
    attention = _attention_bytes(a, tokens, tp, itemsize)
    mlp = mlp_activation_bytes(a, tokens, tp, sequence_parallel, itemsize)
    return entry + norm + max(attention, mlp)


def _norm_bytes(
    a: ArchitectureConfig, tokens: int, tp: int, sequence_parallel: bool, itemsize: int
) -> int:
    norm_tokens = tokens // tp if sequence_parallel else tokens
    return norm_tokens * ((FP32 + 2 * itemsize) * a.hidden_size + FP32)


def _attention_bytes(a: ArchitectureConfig, tokens: int, tp: int, itemsize: int) -> int:
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
    """The part of `layer_activation_bytes` that the MLP or the experts keep."""
    if a.num_experts is None:
        return tokens * 5 * itemsize * a.mlp_hidden_size // tp
    expert = itemsize * (a.hidden_size + 6 * a.mlp_hidden_size // tp)
    routing = 5 * a.num_experts + 12 * a.moe_router_topk
    return dispatched_tokens(a, tokens, tp, sequence_parallel) * expert + tokens * routing


def chunk_activation_bytes(
    role: LearningConfig, layer: int, mlp: int, entry: int
) -> tuple[int, int]:
    """What a chunk of layers keeps for its backward pass, and what that pass computes once more.

    layer, mlp: activations of one layer, and of its MLP among them
    entry:      hidden states that enter a layer
    Returns bytes of each micro-batch under way, and bytes at one time beside them.
    """
    layers, size = role.layers_per_chunk, role.recompute_num_layers
    if role.recompute is Recompute.NONE:
        return layers * layer, 0
    if role.recompute is Recompute.SELECTIVE:
        return layers * (layer - mlp), mlp
    if role.recompute_method is RecomputeMethod.UNIFORM:
        return layers // size * entry, size * layer
    # Layers that are kept follow the others, so that they are freed before one is recomputed.
    return size * entry + (layers - size) * layer, layer if size == layers else 0


def dispatched_tokens(a: ArchitectureConfig, tokens: int, tp: int, sequence_parallel: bool) -> int:
    """Count the tokens that a rank's experts compute in a layer, each once per expert chosen.

    For routing that is balanced over the ranks. Without sequence parallel every tensor-parallel
    rank sends all tokens.
    """
    return tokens * (a.moe_router_topk if a.num_experts else 0) * (1 if sequence_parallel else tp)


def dispatch_bytes(
    a: ArchitectureConfig, tokens: int, tp: int, sequence_parallel: bool, itemsize: int
) -> int:
    """Return the bytes of hidden states on their way to the experts and back: three copies."""
    dispatched = dispatched_tokens(a, tokens, tp, sequence_parallel)
    return 3 * dispatched * a.hidden_size * itemsize


def exchange_bytes(a: ArchitectureConfig, tokens: int, tp: int, ep: int, itemsize: int) -> int:
    """Return the bytes of a layer's experts in generation, where `ep` ranks share them.

    For all tokens: the routing and the results. For one exchange at a time: the tokens of all
    ranks, their results in fp32, and for each choice of a token numbers for sorting, and the most
    of: its result, also in fp32; a hidden state and two parts of the gated MLP; three parts of it,
    one also in fp32.

    tokens: of the rank that has the most
    """
    routing = 5 * (a.num_experts or 0) + 20 * a.moe_router_topk
    own = tokens * (a.hidden_size * itemsize + routing)
    together = ep * min(tokens, max(1, EXCHANGE_TOKENS // ep))
    width = a.mlp_hidden_size // tp
    result = a.hidden_size * (itemsize + FP32)
    widened = a.hidden_size * itemsize + 2 * width * itemsize
    choice = 40 + max(result, widened, width * (3 * itemsize + FP32))
    gathered = together * a.hidden_size * (itemsize + FP32)
    return own + gathered + together * a.moe_router_topk * choice


def micro_batch_tokens(role: RoleConfig, samples: int, length: int) -> int:
    """Count the tokens of a rank's largest micro-batch of `samples` of at most `length` tokens."""
    limit = role.max_tokens_per_micro_batch
    if limit is None:
        return min(role.micro_batch_size, samples) * length
    return min(limit, samples * length)


def micro_batches(role: RoleConfig, samples: int, length: int) -> int:
    """Count the micro-batches of `samples` on a rank; where tokens are counted, at most.

    A group of consecutive samples is closed only when it holds limit / length of them or more.
    """
    limit = role.max_tokens_per_micro_batch
    size = role.micro_batch_size if limit is None else max(limit // length, 1)
    return _filled(-(-samples // size), role.micro_batch_multiple)


def in_flight(pp_rank: int, pp: int, micro_batches: int, chunks: int = 1) -> int:
    """Count the chunks of micro-batches whose activations a stage holds at once.

    Those before its first backward pass in the 1F1B schedule, interleaved with several chunks.
    """
    if chunks == 1:
        return min(pp - pp_rank, micro_batches)
    return min(2 * (pp - pp_rank - 1) + (chunks - 1) * pp + 1, micro_batches * chunks)


def stage_transfer_bytes(tokens: int, hidden_size: int, itemsize: int) -> int:
    """Return the bytes of hidden states that a stage receives and sends for one micro-batch."""
    return 2 * tokens * hidden_size * itemsize


def last_hidden_bytes(tokens: int, read: int, hidden_size: int, itemsize: int) -> int:
    """Return the bytes of the last stage's hidden states, up to those that are read.

    These are the final norm's input in fp32 and its output, all hidden states, and those read.

    read: tokens whose log-prob or value is wanted
    """
    return hidden_size * (tokens * (FP32 + 2 * itemsize) + read * itemsize)


def log_prob_head_bytes(tokens: int, vocab: int, chunk: int) -> int:
    """Return the bytes of logits, shifted logits, exponentials and a product, fp32, of one chunk.

    vocab: rows of the output layer on this rank
    """
    return 4 * FP32 * min(tokens, chunk) * vocab


def score_head_bytes(tokens: int, hidden_size: int) -> int:
    """Return the bytes of the hidden states that are read, in fp32."""
    return FP32 * tokens * hidden_size


def weight_gradient_bytes(
    shared: Sequence[int], experts: Sequence[int], together: int, itemsize: int
) -> int:
    """Return the bytes of the largest gradient that exists before it is added to the buffer.

    shared, experts: numbers of each parameter outside the experts, and of them
    together:        experts of a layer on a rank, whose gradients are computed in one product
    """
    return max(max(shared, default=0), together * max(experts, default=0)) * itemsize


def head_gradient_bytes(vocab: int, hidden: int) -> int:
    """Return the bytes of the sum of a head's gradient over the chunks of tokens, in fp32.

    vocab: rows of this rank
    """
    return FP32 * vocab * hidden


def paged(length: int) -> int:
    """Round a number of tokens up to whole pages of the KV cache."""
    return _filled(length, PAGE)


def kv_cache_bytes(tokens: int, a: ArchitectureConfig, tp: int, itemsize: int) -> int:
    """Return the bytes of the keys and values of `tokens`, in all layers.

    Ranks that share a key-value group each hold it.
    """
    groups = groups_per_rank(a.kv_heads, tp)
    return 2 * tokens * a.num_layers * groups * a.head_dim * itemsize


def kv_cache_tokens(token_bytes: int, memory: int | None) -> int | None:
    """Count the tokens that the KV cache may hold where the number of rows is left open.

    token_bytes: of the keys and values of one token
    memory:      bytes of a device; None = not known, which sets no limit
    """
    return None if memory is None else int(CACHE_SHARE * memory) // token_bytes


def kv_cache_rows(
    limit: int | None, waiting: int, prompt: int, response: int, tokens: int | None
) -> int:
    """Count the sequences that a rank generates at once.

    limit:  num_samples_per_step; without it as many as the cache holds with half a response each,
            at least one: they begin short, and those with the fewest tokens wait once it is full
    tokens: that the cache may hold; None = any number
    """
    if limit is None:
        row = min(paged(prompt + response // 2), prompt + response)
        limit = waiting if tokens is None else max(1, tokens // row)
    return min(limit, waiting)


def kv_cache_most_tokens(rows: int, length: int, tokens: int | None) -> int:
    """Count the tokens that the cache of `rows` sequences of up to `length` tokens has room for.

    tokens: that it may hold, one sequence at least; None = any number
    """
    return rows * length if tokens is None else min(rows * length, max(tokens, length))


def prefill_tokens(rows: int, known: int) -> int:
    """Count the tokens of the largest prefill pass.

    known: tokens of a row when it enters, at most: its prompt, and what it had drawn where it may
           have waited
    """
    return min(rows * known, max(PREFILL_TOKENS, known))


def sampling_bytes(rows: int, vocab: int, do_sample: bool, sorts: bool = False) -> int:
    """Return the bytes that choosing the next tokens takes.

    Greedy: three arrays in fp32, logits, scaled logits and a log-softmax. Sampling: up to seven,
    with what is left of the logits after each filter, weights, and weights in whole blocks.
    top_p: ids of 8 bytes beside logits, a log-softmax, what two filters left, probabilities, and
    their running sum with a copy.
    vocab: the whole vocabulary, which every tensor-parallel rank gathers
    sorts: whether top_p is below 1
    """
    return rows * vocab * ((7 if do_sample else 3) * FP32 + (8 if sorts else 0))


def row_state_bytes(rows: int, response: int) -> int:
    """Return the bytes of what has been drawn for each row: token, log-prob and random number.

    8, 4 and 4 bytes for each token of a response, and one place more.
    """
    return 16 * rows * (response + 1)


def gather_buffer_bytes(tokens: int, hidden_size: int, itemsize: int) -> int:
    """Return the bytes of Megatron's lasting buffer for tokens that sequence parallel gathers."""
    return tokens * hidden_size * itemsize


def communicators(
    tp: int, pp: int, dp: int, trains: bool, generates: bool, ep: int = 1, experts: bool = False
) -> int:
    """Count the groups of more than one rank that a role makes device buffers for.

    experts: the model has some, whose tensor-parallel groups are Megatron's own, with ep too
    """
    model = trains and tp * pp > 1  # sums the gradient norm
    dense = sum((tp > 1, pp > 1, dp > 1, model, generates and tp > 1))
    if not experts:
        return dense
    sums = trains and ep > 1
    training = sum((tp > 1, ep > 1, tp * ep > 1, sums and dp > ep, sums))
    return dense + training + (sum((tp > 1, ep > 1)) if generates else 0)


def sample_bytes(prompt: int, response: int) -> int:
    """Return the host memory of one sample's rows, over all roles (fields of `data.batch`).

    Prompt ids 8; response ids 8, log-probs of rollout, actor and reference 4 each, the KL over the
    vocabulary 4; values 4; then advantages 4, mask 1, old and reference log-probs 4 each, returns
    4, values 4, mask 1; values, returns, their copy and mask have one slot more. Lengths, id, end
    flag and score: 29.
    """
    return 8 * prompt + 50 * response + 3 * 4 + 1 + 29


def store_bytes(samples: int, sample_bytes: int) -> int:
    """Return the host memory of an iteration's rows, and of the last one's until replaced."""
    return 2 * samples * sample_bytes


def driver_bytes(process: int, samples: int, prompt: int) -> int:
    """Return the host memory of the driver: the process and an iteration's prompts."""
    return process + 8 * samples * prompt


def export_bytes(numbers: int, itemsize: int, stored_itemsize: int) -> int:
    """Return the disk that a role's final weights take.

    The Hugging Face folder is in the precision of the folder they came from, the Megatron folder
    in that of the model. numbers: of the whole model
    """
    return numbers * (stored_itemsize + itemsize)


def checkpoint_bytes(numbers: int, itemsize: int) -> int:
    """Return the disk of a role's checkpoint: weights and optimizer. numbers: of the whole model"""
    return numbers * (itemsize + optimizer_number_bytes(itemsize))
