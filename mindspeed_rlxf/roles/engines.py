"""Each role's training engine, built from the run's configuration."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, TypeAlias

from mindspeed_rlxf import device
from mindspeed_rlxf.config.enums import LossNormalizer, Role
from mindspeed_rlxf.config.registry import add_to
from mindspeed_rlxf.config.schema import LearningConfig, RoleConfig, RunConfig
from mindspeed_rlxf.engine import offload
from mindspeed_rlxf.engine.train_engine import TrainEngine
from mindspeed_rlxf.models.parameter_counts import HEADS
from mindspeed_rlxf.models.parameters import Head

EngineFactory: TypeAlias = Callable[[RunConfig, Role], TrainEngine]


def room_on_device() -> AbstractContextManager[None]:
    """Return a context in which this process's engines keep their parts on the host.

    For a model outside the engines that needs device memory.
    """
    return offload.holding()


def let_stay(guest: offload.Guest) -> None:
    """Let a guest stay on the device until something in this process needs the room."""
    offload.guests.add(guest)


def keep(guest: offload.Guest) -> None:
    """Keep a guest on the device, whoever needs room, until `let_stay`."""
    offload.guests.discard(guest)


def device_model() -> str:
    """Return the device's model name, empty on CPU."""
    return device.device_name()


def megatron_engine(config: RunConfig, role: Role) -> TrainEngine:
    """Return a role's Megatron engine, with an optimizer if the role is trained.

    A collective over the role's ranks, which load the weights. Megatron is imported here because
    the driver imports this module, and a worker must set up its device first.
    """
    from mindspeed_rlxf.engine.engine import MegatronEngine

    learning, normalizer = _learning(config, role), config.algorithm.loss_normalizer
    return MegatronEngine(
        *_model(config, role),
        **learning,
        deterministic=config.training.deterministic,
        tokenizer=config.training.tokenizer_name_or_path if learning else None,
        brings_together=normalizer is not LossNormalizer.MICRO_BATCH_MEAN
        and not config.compares_pairs,
    )


def fsdp_engine(config: RunConfig, role: Role) -> TrainEngine:
    """Return a role's engine over a model of transformers, as `megatron_engine`."""
    from mindspeed_rlxf.engine.fsdp.engine import FsdpEngine

    actor = config.actor_rollout
    return FsdpEngine(
        *_model(config, role),
        **_learning(config, role),
        deterministic=config.training.deterministic,
        longest_row=actor.max_prompt_length + actor.max_new_tokens,
    )


TRAIN_ENGINES: dict[str, EngineFactory] = {"megatron": megatron_engine, "fsdp": fsdp_engine}
"""Value of a role's key `backend` -> what builds its engine."""


def register_train_engine(name: str) -> Callable[[EngineFactory], EngineFactory]:
    """Return a decorator that adds an engine to TRAIN_ENGINES; ValueError if the name is taken."""
    return add_to(TRAIN_ENGINES, name, "training engine", "backend")


def train_engine(config: RunConfig, role: Role) -> TrainEngine:
    """Return a role's training engine, chosen by its `backend`; a collective over its ranks."""
    return TRAIN_ENGINES[config.role(role).backend](config, role)


def _model(config: RunConfig, role: Role) -> tuple[RoleConfig, Head, int]:
    return config.role(role), HEADS[role], config.training.seed


def _learning(config: RunConfig, role: Role) -> dict[str, Any]:
    """Return an engine's arguments for training; {} for a frozen role."""
    from mindspeed_rlxf.engine.step_guard import SkippedSteps

    section, training = config.role(role), config.training
    if not isinstance(section, LearningConfig):
        return {}
    name = "actor" if role is Role.ACTOR_ROLLOUT else "critic"
    return {
        "optimizer": section.optimizer,
        "train_iters": config.learning_iters(role),
        "skipped": SkippedSteps(training.nan_policy, training.max_skipped, name),
    }
