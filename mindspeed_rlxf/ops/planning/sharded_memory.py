"""Compute a role's device memory with FSDP: what lasts on a rank, and what phases add.

All ranks have equal shards of every parameter. A layer's whole weights are on the device while it
computes, those outside the layers (the root's) during the whole pass. Bytes are per rank.
"""

import contextlib
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import lru_cache
from math import prod
from pathlib import Path

from mindspeed_rlxf import device
from mindspeed_rlxf.config.enums import Recompute, Role
from mindspeed_rlxf.config.hf_config import read_text_config
from mindspeed_rlxf.config.lora import LoraConfig, can_adapt
from mindspeed_rlxf.config.schema import ArchitectureConfig, LearningConfig, RunConfig
from mindspeed_rlxf.models.heads import CHUNK_TOKENS
from mindspeed_rlxf.models.parameter_counts import HEADS
from mindspeed_rlxf.models.parameters import Head, hf_shapes
from mindspeed_rlxf.ops.planning.stage_memory import (
    FP32,
    LayerBytes,
    Phase,
    State,
    fp32_weight_bytes,
    head_bytes,
    itemsize,
    logit_bytes,
    micro_batch_tokens,
    micro_batches,
    mini_batch_size,
    role_beside,
)
from mindspeed_rlxf.weights.hf_folder import open_hf_folder

LAYER = re.compile(r"\.layers\.(\d+)\.")
OUTPUT = "lm_head.weight"
LAYERS_AT_ONCE = 2  # the present one, and the next one that is gathered ahead


@lru_cache(maxsize=64)
def element_counts(
    load: str | None, architecture: ArchitectureConfig, head: Head
) -> tuple[int, tuple[int, ...]]:
    """Return a model's elements outside its layers, and in each layer.

    From the headers of the folder `load`; if it is not there, by the parameter map.
    """
    shapes = _shapes(load, architecture, head)
    counts: Counter[int] = Counter()
    outside = -1
    for name, shape in shapes.items():
        if head is Head.SCORE and name == OUTPUT:
            continue
        layer = LAYER.search(name)
        counts[int(layer[1]) if layer else outside] += prod(shape)
    return counts.pop(outside, 0), tuple(counts.values())


@lru_cache(maxsize=64)
def adapter_elements(
    load: str | None, architecture: ArchitectureConfig, head: Head, lora: LoraConfig
) -> int:
    """Count the elements of a model's adapters, as `element_counts`."""
    count = 0
    for name, shape in _shapes(load, architecture, head).items():
        module = name.rpartition(".")[0]
        is_linear = len(shape) == 2 and LAYER.search(name) is not None and can_adapt(module)
        if is_linear and lora.selects(module):
            count += lora.rank * sum(shape)
    return count


@lru_cache(maxsize=64)
def scored_layers(load: str | None, length: int) -> tuple[int, bool]:
    """Count the layers whose attention keeps scores, a number for each pair of tokens.

    These have a cap, sinks, or a window shorter than `length`. Also returns whether they have more
    than the window. No layers if the folder `load` cannot be read.
    """
    with contextlib.suppress(ValueError, OSError):
        config = read_text_config(Path(str(load)))
        window = getattr(config, "sliding_window", None)
        layer_kinds = getattr(config, "layer_types", None) or ["sliding_attention"]
        num_layers = config.num_hidden_layers
        has_cap = getattr(config, "attn_logit_softcapping", None)
        if has_cap or any(name.endswith(".sinks") for name in open_hf_folder(str(load))):
            return num_layers, True
        if window is not None and window < length:
            num_sliding = layer_kinds.count("sliding_attention")
            return num_layers * num_sliding // len(layer_kinds), False
    return 0, False


def _shapes(
    load: str | None, architecture: ArchitectureConfig, head: Head
) -> Mapping[str, tuple[int, ...]]:
    with contextlib.suppress(ValueError, OSError):
        return {name: tensor.shape for name, tensor in open_hf_folder(str(load)).items()}
    return hf_shapes(architecture, head)


def layer_bytes(
    a: ArchitectureConfig, tokens: int, item: int, frozen_norms: bool = False
) -> LayerBytes:
    """Compute the activations of a layer of transformers for a rank's `tokens`."""
    # As in Megatron's layers: input in fp32, normed value, output, root per token.
    norm = tokens * ((FP32 + (1 if frozen_norms else 2) * item) * a.hidden_size + FP32)
    queries = a.num_attention_heads * a.head_dim
    keys = a.kv_heads * a.head_dim
    # Projections, turned halves, rotated queries and keys, values, the result and its copy, the
    # log of the softmax's divisor.
    attention = item * (5 * queries + 4 * keys) + FP32 * a.num_attention_heads
    if a.qk_layernorm:
        attention += (FP32 + item) * (queries + keys)
    mlp = 4 * item * a.mlp_hidden_size
    if a.num_experts:
        # Sorted inputs, both halves together and apart, their product, the results.
        pairs = a.moe_router_topk
        mlp = pairs * item * (2 * a.hidden_size + 6 * a.mlp_hidden_size) + 8 * a.num_experts
    return LayerBytes(norm, tokens * attention, tokens * mlp, 0, tokens * a.hidden_size * item)


class ShardedModel:
    """One role with FSDP, with the sizes behind its memory."""

    def __init__(self, config: RunConfig, role: Role) -> None:
        self.config = config
        self.role = role
        self.section = config.role(role)
        self.head = HEADS[role]
        self.layout = config.layout(role)
        self.root, self.layers = element_counts(
            self.section.load, self.section.architecture, self.head
        )
        self.numbers = self.root + sum(self.layers)
        # A shared reference is the actor's model, whose row has all that lasts.
        self.is_shared = role is Role.REF and config.shares_reference
        self.lora = self.section.adapters
        self.adapters = 0  # elements of adapters
        # Elements that are trained.
        self.learnt = self.numbers if isinstance(self.section, LearningConfig) else 0
        if self.lora.rank:
            model = self.section.load, self.section.architecture, self.head
            self.adapters = adapter_elements(*model, self.lora)
            scores = self.section.architecture.hidden_size if self.head is Head.SCORE else 0
            self.learnt = self.adapters + scores
        self.item = itemsize(self.section)
        self.ranks = self.layout.world_size
        self.response = config.actor_rollout.max_new_tokens
        self.length = config.actor_rollout.max_prompt_length + self.response
        self.scored, self.is_capped = scored_layers(self.section.load, self.length)

    def state(self) -> State:
        """Return the bytes that last: fp32 main weights and moments where the role is trained.

        Gradients exist in updates only.
        """
        if self.is_shared:
            return State(0, 0, 0)
        shard = -(-self.numbers // self.ranks)
        learnt = -(-self.learnt // self.ranks)
        if self.learnt == self.numbers:
            return State(shard * FP32, 0, shard * 2 * FP32)
        return State(shard * self.item + learnt * FP32, 0, learnt * 2 * FP32)

    def communication_bytes(self) -> int:
        """Return the buffers of the process groups: all ranks', and the Ulysses group's."""
        if self.is_shared:
            return 0
        groups = (self.ranks > 1) + (self.section.context_parallel_size > 1)
        return groups * device.communicator_bytes(self.config.device.kind)

    def phases(self) -> Iterator[Phase]:
        """Yield forward and, for a trained role, update and optimizer step."""
        beside = role_beside(self.config, self.role)
        samples = self.config.samples_per_iteration // self.layout.dp
        layer = self._layer(samples)
        _, computing_scores = self._scores(samples)
        layer = replace(layer, attention=layer.attention + computing_scores)
        activations = max(layer.forward, self._head_bytes(samples))
        yield Phase("forward", activations, other=self._whole_weights(), beside=beside)
        if not self.learnt or self.is_shared:
            return
        yield self._update(mini_batch_size(self.config, self.role) // self.layout.dp)
        yield Phase("optimizer step", other=-(-self.learnt // self.ranks) * FP32, learns=True)

    def _whole_weights(self) -> int:
        """Return the bytes of gathered weights: the root's, and those of LAYERS_AT_ONCE layers."""
        largest = sorted(self.layers)[-LAYERS_AT_ONCE:]
        return (self.root + sum(largest)) * self.item

    def _update(self, samples: int) -> Phase:
        section = self.section
        assert isinstance(section, LearningConfig), "frozen roles have no update"
        layer = self._layer(samples)
        num_layers = len(self.layers)
        scores, computing_scores = self._scores(samples)
        # Activations from the forward pass, and those of a layer while it computes backward. The
        # MLP's are not there together with attention's.
        activations = num_layers * layer.kept + scores * self.scored
        computing = max(0, computing_scores - layer.mlp)
        if section.recompute is Recompute.FULL:
            activations = num_layers * layer.entry
            computing += layer.kept + scores
        # Elements with gradients: a rank's shards, outside the layers, and in the largest layer.
        shard = -(-self.learnt // self.ranks)
        root = self.root
        largest = max(self.layers, default=0)
        if self.lora.rank:
            root = 0
            largest = self.adapters // max(num_layers, 1)
        head = self._head_bytes(samples, learns=True)
        reads_chunks = self._read(samples) > CHUNK_TOKENS
        if self.head is Head.LANGUAGE_MODEL and reads_chunks and not self.lora.rank:
            head += FP32 * section.architecture.vocab_size * section.architecture.hidden_size
        # The head's activations are freed before the backward pass reaches a layer. Micro-batches
        # that are not reduced add up whole fp32 gradients. Others' become shards layer by layer,
        # while activations are freed, and are added to those of the micro-batches before.
        adds_up = micro_batches(section, samples, self.length) > 1
        if adds_up and not section.reduce_each_micro_batch:
            peak = activations + max(head, computing) + self.learnt * FP32
        else:
            summed = shard if adds_up else 0
            at_begin = activations + max(head, computing + (root + largest) * FP32)
            at_end = layer.kept + (root + shard) * FP32
            peak = max(at_begin + summed * FP32, at_end)
        return Phase("update", peak, other=self._whole_weights(), learns=True)

    def _scores(self, samples: int) -> tuple[int, int]:
        """Return a layer's bytes for scores of pairs of tokens: kept, and while it computes.

        Kept are probabilities and, with a cap or sinks, what is made of the scores before.
        """
        if not self.scored:
            return 0, 0
        section = self.section
        num_pairs = self.length**2
        heads = section.architecture.num_attention_heads // section.context_parallel_size
        rows = micro_batch_tokens(section, samples, self.length) // self.length
        at_once = 1 if section.packed_sequences else rows
        narrow = self.item if self.item < FP32 else 0
        kept_bytes = FP32 + narrow + self.item * self.is_capped
        mask_bytes = self.item + 12  # from distances of 8 bytes and conditions
        computing_bytes = at_once * heads * (2 * FP32 + narrow) + mask_bytes
        return rows * heads * num_pairs * kept_bytes, num_pairs * computing_bytes

    def _own_tokens(self, samples: int) -> int:
        tokens = micro_batch_tokens(self.section, samples, self.length)
        return -(-tokens // self.section.context_parallel_size)

    def _layer(self, samples: int) -> LayerBytes:
        adapted = self.lora.rank > 0
        return layer_bytes(self.section.architecture, self._own_tokens(samples), self.item, adapted)

    def _read(self, samples: int) -> int:
        # The responses are at the end of their rows, so one rank may have most of a row's.
        slots = self.response if self.head is Head.LANGUAGE_MODEL else self.response + 1
        read = micro_batch_tokens(self.section, samples, slots)
        return min(read, self._own_tokens(samples))

    def _head_bytes(self, samples: int, learns: bool = False) -> int:
        a = self.section.architecture
        tokens = self._own_tokens(samples)
        per_logit = logit_bytes(self.config, self.role, self.item, learns)
        sizes = tokens, self._read(samples), self.item, a.vocab_size, per_logit
        head = head_bytes(a, self.head, *sizes)
        if self.head is Head.LANGUAGE_MODEL:
            head += fp32_weight_bytes(self.config, self.section, a.vocab_size)
        return head
