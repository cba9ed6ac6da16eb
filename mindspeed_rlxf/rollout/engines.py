"""The registry of rollout engines, by the name in `rollout.engine`. It imports no Megatron."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

from mindspeed_rlxf.config.registry import register_part
from mindspeed_rlxf.config.schema import RunConfig
from mindspeed_rlxf.engine.protocol import TrainEngine
from mindspeed_rlxf.rollout.protocol import RolloutEngine

NATIVE = "native"
"""Name of the package's own engine, which generates with the Megatron model itself."""

EngineFactory: TypeAlias = Callable[[RunConfig, TrainEngine], RolloutEngine]
"""(configuration, the actor's training engine in the same process) -> the engine of this rank.

The new engine has no weights yet. Before the first generation its `update_weights` gets all of
them: whole tensors, on the actor's device. All ranks of a tensor-parallel group make the same calls
on their engines; only the results of the first rank are used.
"""

ENGINES: dict[str, EngineFactory] = {}
"""Factories of the engines of plugins, by name."""


def register_rollout_engine(name: str) -> Callable[[EngineFactory], EngineFactory]:
    """Return a decorator that adds an engine class, or a function that makes one, to `ENGINES`.

    The decorator returns the class or function unchanged. It raises ValueError for a name that is
    taken, "native" among them.
    """

    def register(factory: EngineFactory) -> EngineFactory:
        if name == NATIVE:
            raise ValueError(f"rollout engine {name!r} is the package's own; choose another name")
        register_part(ENGINES, name, factory, "rollout engine")
        return factory

    return register
