"""Count the parameters of a model and of a rank by the parameter map."""

from functools import lru_cache
from math import prod

from mindspeed_rlxf.config.enums import Role
from mindspeed_rlxf.config.schema import ArchitectureConfig
from mindspeed_rlxf.models.parameters import Head, hf_shapes, rank_parameters, shard_shape

HEADS = {
    Role.ACTOR_ROLLOUT: Head.LANGUAGE_MODEL,
    Role.REF: Head.LANGUAGE_MODEL,
    Role.CRITIC: Head.SCORE,
    Role.REWARD: Head.SCORE,
}


def model_numbers(architecture: ArchitectureConfig, head: Head) -> int:
    """Count the parameters of the whole model, without padding; tied weights count once."""
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
    """Return the elements of each parameter on a pipeline rank, padding included, experts last."""
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
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the elements of each parameter's shard on one rank: outside experts, and of experts.

    A tensor-parallel rank is not given: all have the same sizes.
    """
    sizes: dict[bool, list[int]] = {False: [], True: []}
    for parameter in rank_parameters(architecture, head, pp_rank, pp, chunks, 0, ep):
        size = prod(shard_shape(parameter, architecture, tp))
        sizes[parameter.expert is not None].append(size)
    return tuple(sizes[False]), tuple(sizes[True])


@lru_cache(maxsize=1024)
def received_numbers(
    architecture: ArchitectureConfig,
    head: Head,
    tp: int,
    pp_rank: int,
    pp: int,
    chunks: int = 1,
    ep: int = 1,
) -> int:
    """Count the elements that a pipeline rank receives before it generates with all layers.

    They are its shards of the other stages' parameters; of experts only those of its own
    expert-parallel rank. A last stage with a tied output layer receives the embedding too.
    """
    own = [
        prod(shard_shape(parameter, architecture, tp))
        for parameter in rank_parameters(architecture, head, pp_rank, pp, chunks, 0, ep)
        if not parameter.is_tied_output_layer
    ]
    return sum(shard_sizes(architecture, head, tp, 0, 1, 1, ep)) - sum(own)
