"""Each role's training engine, built from the run's configuration."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, TypeAlias

from mindspeed_rlxf import device
from mindspeed_rlxf.config.enums import LossNormalizer, Role
from mindspeed_rlxf.config.schema import LearningConfig, RunConfig
from mindspeed_rlxf.engine import offload
from mindspeed_rlxf.engine.train_engine import TrainEngine
from mindspeed_rlxf.models.parameter_counts import HEADS

if TYPE_CHECKING:
    from mindspeed_rlxf.engine.engine import MegatronEngine

EngineFactory: TypeAlias = Callable[[RunConfig, Role], TrainEngine]


def room_on_device() -> AbstractContextManager[None]:
    """Return a context in which this process's engines keep their parts on the host.

    For a model outside the engines that needs device memory.
    """
    return offload.holding()


def device_model() -> str:
    """Return the device's model name, empty on CPU."""
    return device.device_name()


def megatron_engine(config: RunConfig, role: Role) -> MegatronEngine:
    """Return a role's Megatron engine, with an optimizer if the role is trained.

    A collective over the role's ranks, which load the weights. Megatron is imported here because
    the driver imports this module, and a worker must set up its device first.
    """
    from mindspeed_rlxf.engine.engine import MegatronEngine
    from mindspeed_rlxf.engine.finite import SkippedSteps

    section, training = config.role(role), config.training
    if not isinstance(section, LearningConfig):
        return MegatronEngine(
            section, HEADS[role], training.seed, deterministic=training.deterministic
        )
    name = "actor" if role is Role.ACTOR_ROLLOUT else "critic"
    return MegatronEngine(
        section,
        HEADS[role],
        training.seed,
        section.optimizer,
        config.learning_iters(role),
        SkippedSteps(training.nan_policy, training.max_skipped, name),
        training.deterministic,
        training.tokenizer_name_or_path,
        config.algorithm.loss_normalizer is not LossNormalizer.MICRO_BATCH_MEAN
        and not config.compares_pairs,
    )
