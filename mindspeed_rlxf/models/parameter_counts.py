"""Count parameters in a model and on a rank, by the parameter map."""

from functools import lru_cache
from math import prod

from mindspeed_rlxf.config.enums import Role
from mindspeed_rlxf.config.lora import LoraConfig
from mindspeed_rlxf.config.schema import ArchitectureConfig
from mindspeed_rlxf.models.adapter_parameters import adapted_sources, adapter_parameters
from mindspeed_rlxf.models.parameters import (
    Head,
    hf_shapes,
    rank_parameters,
    shard_shape,
    stage_parameters,
)

HEADS = {
    Role.ACTOR_ROLLOUT: Head.LANGUAGE_MODEL,
    Role.REF: Head.LANGUAGE_MODEL,
    Role.CRITIC: Head.SCORE,
    Role.REWARD: Head.SCORE,
}


def model_elements(architecture: ArchitectureConfig, head: Head) -> int:
    """Count a whole model's parameters, without padding; tied weights count once."""
    return sum(map(prod, hf_shapes(architecture, head).values()))


def shard_sizes(
    architecture: ArchitectureConfig,
    head: Head,
    tp: int,
    pp_rank: int,
    pp: int,
    chunks: int = 1,
    ep: int = 1,
) -> tuple[int, ...]:
    """Return each parameter's elements on a pipeline rank, with padding, experts last."""
    shared, experts = split_sizes(architecture, head, tp, pp_rank, pp, chunks, ep)
    return shared + experts


@lru_cache(maxsize=1024)  # a plan asks for the same ranks many times
def split_sizes(
    architecture: ArchitectureConfig,
    head: Head,
    tp: int,
    pp_rank: int,
    pp: int,
    chunks: int = 1,
    ep: int = 1,
    with_attention: bool = True,
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return each parameter shard's elements on one rank: outside experts, and in experts.

    All tensor-parallel ranks have the same sizes. Those in attention layers may be left out.
    """
    sizes: dict[bool, list[int]] = {False: [], True: []}
    for parameter in rank_parameters(architecture, head, pp_rank, pp, chunks, 0, ep):
        if parameter.is_of_attention and not with_attention:
            continue
        size = prod(shard_shape(parameter, architecture, tp))
        sizes[parameter.expert is not None].append(size)
    return tuple(sizes[False]), tuple(sizes[True])


@lru_cache(maxsize=1024)
def received_elements(
    architecture: ArchitectureConfig,
    head: Head,
    tp: int,
    pp_rank: int,
    pp: int,
    chunks: int = 1,
    ep: int = 1,
) -> int:
    """Count the elements a pipeline rank receives before generating with all layers.

    They are its shards from other stages; among experts only its own expert-parallel rank's. A last
    stage with a tied output layer receives the embedding too.
    """
    of_stage = 0
    for parameter in rank_parameters(architecture, head, pp_rank, pp, chunks, 0, ep):
        if not parameter.is_tied_output_layer:
            of_stage += prod(shard_shape(parameter, architecture, tp))
    of_all_stages = sum(shard_sizes(architecture, head, tp, 0, 1, 1, ep))
    return of_all_stages - of_stage


@lru_cache(maxsize=1024)
def adapter_sizes(
    architecture: ArchitectureConfig,
    head: Head,
    lora: LoraConfig,
    tp: int = 1,
    pp_rank: int = 0,
    pp: int = 1,
    chunks: int = 1,
) -> tuple[int, ...]:
    """Return the elements on a rank of each adapter's A and B."""
    table = rank_parameters(architecture, head, pp_rank, pp, chunks)
    adapters = adapter_parameters(table, architecture, lora)
    return tuple(prod(shard_shape(p, architecture, tp)) for p in adapters)


def joined_elements(architecture: ArchitectureConfig, lora: LoraConfig, tp: int) -> int:
    """Count the elements of the copies that decode steps compute adapters with on a rank.

    They join the modules of a linear (see `LinearAdapters.joined`): query, key and value; gate and
    up.
    """
    elements = 0
    for parameter in stage_parameters(architecture, Head.LANGUAGE_MODEL):
        inner = lora.rank * len(adapted_sources(parameter, lora))
        if inner and len(parameter.sources) > 1:
            outputs, inputs = shard_shape(parameter, architecture, tp)
            elements += inner * (inputs + outputs)
    return elements
