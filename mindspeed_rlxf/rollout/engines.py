"""The registry of rollout engines, by the name in `rollout.engine`. It imports no Megatron."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

from mindspeed_rlxf.config.registry import register_part
from mindspeed_rlxf.config.schema import RunConfig
from mindspeed_rlxf.engine.protocol import TrainEngine
from mindspeed_rlxf.rollout.protocol import RolloutEngine

NATIVE = "native"
"""Generation with the Megatron model itself (`native`)."""

EngineFactory: TypeAlias = Callable[[RunConfig, TrainEngine], RolloutEngine]
"""(configuration, the actor's engine in the same process) -> the engine of this rank.

It has no weights yet: `update_weights` loads them, whole tensors on the actor's device, before the
first generation. Ranks of one tensor-parallel group make the same calls; one's results are used.
"""

ENGINES: dict[str, EngineFactory] = {}
"""Those of plugins."""


def register_rollout_engine(name: str) -> Callable[[EngineFactory], EngineFactory]:
    """Decorator that registers an engine class, or a function that makes one, under a name.

    Raises ValueError for a name that is taken.
    """

    def register(factory: EngineFactory) -> EngineFactory:
        if name == NATIVE:
            raise ValueError(f"rollout engine {name!r} is the package's own; choose another name")
        register_part(ENGINES, name, factory, "rollout engine")
        return factory

    return register
