"""The policy of a test: the actor, and the rollout with its weights."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from mindspeed_rlxf.cluster.role_groups import ActorGroup, RolloutGroup
from mindspeed_rlxf.config.schema import RunConfig


def build_policy(
    config: RunConfig, pool: Any, eos_token_ids: Sequence[int]
) -> tuple[ActorGroup, RolloutGroup]:
    """Both on one pool, ready to generate."""
    actor, rollout = ActorGroup(config, pool), RolloutGroup(config, pool)
    for build in (actor.build(), rollout.build(eos_token_ids)):
        build.result()
    rollout.update_weights(actor, 0)
    return actor, rollout
