"""What the groups ask of their ranks."""

from types import SimpleNamespace
from typing import Any

import pytest

from mindspeed_rlxf.cluster.interface import Peer
from mindspeed_rlxf.config.rank_layout import ParallelLayout
from mindspeed_rlxf.roles.actor import ActorGroup
from mindspeed_rlxf.roles.rollout import RolloutGroup
from tests.unit.cluster.test_group import RecordingPool


def groups(parts: tuple[int, int] | None) -> tuple[ActorGroup, RolloutGroup, RecordingPool]:
    """Of four ranks, TP 2; parts: those that train, and that generate."""
    train, generate = parts or (4, 4)
    config: Any = SimpleNamespace(
        parts=parts,
        layout=lambda role: ParallelLayout(train, 2),
        rollout_layout=ParallelLayout(generate, 2),
        actor_rollout=None,
        training=SimpleNamespace(seed=1),
    )
    pool = RecordingPool(4)
    return ActorGroup(config, pool), RolloutGroup(config, pool), pool


@pytest.mark.parametrize("parts", [None, (2, 2)])
def test_weights_are_taken_once_for_each_version(parts: tuple[int, int] | None) -> None:
    actor, rollout, pool = groups(parts)
    for version in (0, 0, 1, 1):
        rollout.update_weights(actor, version)
    assert [call.waits for call in pool.calls] == [1, 1]
    update = ("rollout", "update_weights", (1,))
    send = ("actor_rollout", "send_weights", ())
    wanted = [send, send, update, update] if parts else [update] * 4
    assert [(r.role.value, r.method, r.args) for r in pool.requests] == wanted


def test_the_rollout_is_built_with_the_actor_only_where_they_share_processes() -> None:
    for parts, first_rank in ((None, 0), ((2, 2), 2)):
        _, rollout, pool = groups(parts)
        rollout.build([3])
        assert pool.first_rank == first_rank
        actor, scorer = pool.requests[0].args[-2:]
        assert isinstance(actor, Peer) if parts is None else actor is None
        assert scorer is None
