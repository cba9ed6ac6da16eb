"""Undo what plugins register, so that one test does not change the next."""

import contextlib
import sys
from collections.abc import Iterator

from mindspeed_rlxf.agents.session import AGENTS
from mindspeed_rlxf.algorithms.estimators import ESTIMATORS
from mindspeed_rlxf.algorithms.losses import POLICY_LOSSES
from mindspeed_rlxf.config import plugins
from mindspeed_rlxf.config.estimator_traits import TRAITS
from mindspeed_rlxf.config.registry import CHOICES
from mindspeed_rlxf.data.files import READERS
from mindspeed_rlxf.reporting.trackers import TRACKERS
from mindspeed_rlxf.rewards.rules import RULES
from mindspeed_rlxf.roles.engines import TRAIN_ENGINES
from mindspeed_rlxf.roles.objectives import OBJECTIVES
from mindspeed_rlxf.roles.own_roles import OWN_ROLES
from mindspeed_rlxf.rollout.rollout_engine import ENGINES


@contextlib.contextmanager
def restored_registries() -> Iterator[None]:
    """Restore every registry of plugins after the block; remove plugin modules imported in it."""
    registries = (
        ESTIMATORS, TRAITS, RULES, ENGINES, TRACKERS, POLICY_LOSSES, OBJECTIVES, READERS, OWN_ROLES,
        TRAIN_ENGINES, AGENTS, plugins._carried, plugins._loaded,
    )  # fmt: skip
    choices = {key: [*names] for key, names in CHOICES.items()}
    before = [dict(registry) for registry in registries]  # type: ignore[call-overload]
    modules = {name for name in sys.modules if name.startswith(plugins.MODULES)}
    try:
        yield
    finally:
        for name in [name for name in sys.modules if name.startswith(plugins.MODULES)]:
            if name not in modules:
                del sys.modules[name]
        for registry, kept in zip(registries, before, strict=True):
            registry.clear()
            registry.update(kept)  # type: ignore[arg-type]
        CHOICES.update(choices)
