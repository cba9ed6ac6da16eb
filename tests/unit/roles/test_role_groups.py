"""What the groups ask of their ranks, and how many samples may fail before the run stops."""

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from mindspeed_rlxf.cluster.group import RoleFuture
from mindspeed_rlxf.cluster.interface import ColocatedRole, Reply, Request
from mindspeed_rlxf.cluster.refs import RankRows, RowsRef
from mindspeed_rlxf.config.lora import LoraConfig
from mindspeed_rlxf.config.rank_layout import ParallelLayout
from mindspeed_rlxf.roles.actor import ActorGroup
from mindspeed_rlxf.roles.reports import FailedSample
from mindspeed_rlxf.roles.reward import RewardGroup, RewardsFailed, check_failures
from mindspeed_rlxf.roles.rollout import PROBE, RolloutGroup
from tests.unit.cluster.test_group import RecordingCall, RecordingPool


class NoReceipts(RecordingPool):
    """Its rollout ranks compute in their own processes, so they have no receipts of servers."""

    def submit(self, requests: Sequence[Request], first_rank: int = 0) -> RecordingCall:
        call = super().submit(requests, first_rank)
        call.reports = [[] for _ in requests]
        return call


def groups(
    parts: tuple[int, int] | None, rank: int = 0
) -> tuple[ActorGroup, RolloutGroup, RecordingPool]:
    """Of four ranks, TP 2; parts: those that train, and that generate; rank: of adapters."""
    train, generate = parts or (4, 4)
    config: Any = SimpleNamespace(
        train_rollout_split=parts,
        layout=lambda role: ParallelLayout(train, 2),
        rollout_layout=ParallelLayout(generate, 2),
        actor_rollout=SimpleNamespace(lora=LoraConfig(rank=rank)),
        runs_vllm=False,
        training=SimpleNamespace(seed=1),
    )
    pool = NoReceipts(4)
    return ActorGroup(config, pool), RolloutGroup(config, pool), pool


@pytest.mark.parametrize("parts", [None, (2, 2)])
def test_weights_are_taken_once_for_each_version(parts):
    actor, rollout, pool = groups(parts)
    for version in (0, 0, 1, 1):
        rollout.update_weights(actor, version)
    assert [call.waits for call in pool.calls] == [1, 1]
    update = ("rollout", "update_weights", (1, True))
    send = ("actor_rollout", "send_weights", (True,))
    wanted = [send, send, update, update] if parts else [update] * 4
    assert [(r.role.value, r.method, r.args) for r in pool.requests] == wanted


@pytest.mark.parametrize("parts", [None, (2, 2)])
def test_adapters_go_alone_once_their_base_is_there(parts):
    """A probe changes the base too."""
    actor, rollout, pool = groups(parts, rank=4)
    with_base = []
    for version in (0, 1, PROBE, 2, 3):
        rollout._send(actor, version)
        (flag,) = {request.args[-1] for request in pool.requests}
        with_base.append(flag)
    assert with_base == [True, False, True, True, False]


def test_the_rollout_is_built_with_the_actor_only_where_they_share_processes():
    for parts, first_rank in ((None, 0), ((2, 2), 2)):
        _, rollout, pool = groups(parts)
        rollout.build([3])
        assert pool.first_rank == first_rank
        actor, scorer = pool.requests[0].args[2:4]
        assert isinstance(actor, ColocatedRole) if parts is None else actor is None
        assert scorer is None


@pytest.mark.parametrize(
    ("may", "count", "max_failed"), [(0, 64, 0), (3, 64, 3), (6, 64, None), (1, 4, None)]
)
def test_the_run_stops_where_more_samples_fail_than_may(may, count, max_failed):
    """None = a tenth, and at least one."""
    lost = [FailedSample(i, "timeout", "no score within 1 s") for i in range(may + 1)]
    scored = [None] * (count - may)
    check_failures([*lost[:may], *scored], max_failed)
    check_failures([], max_failed)
    with pytest.raises(RewardsFailed) as error:
        check_failures([*lost, *scored[1:]], max_failed)
    said = f"{may + 1} of {count} samples of a batch could not be scored"
    assert str(error.value).startswith(said)
    assert str(error.value).count("timeout (no score within 1 s)") == 1, "named once"
    assert all(str(failure.sample_id) in str(error.value) for failure in lost)


class Ended:
    handles = ("rows",)
    waited = 0

    def wait(self) -> list[Reply]:
        self.waited += 1
        return [Reply("report", 1, 0.0)]


def test_scores_of_a_model_wait_for_those_of_the_functions():
    """A call that nobody waits for would keep the rows that it reads."""
    functions, model = Ended(), Ended()
    group: Any = RewardGroup.__new__(RewardGroup)
    group.streams, group._check = True, lambda _: None
    group._score_by_functions = lambda _: RoleFuture(functions, [0], [1])
    ranks = SimpleNamespace(dp=1)
    answer = lambda *_: RoleFuture(model, [0], [1])  # noqa: E731
    group.scorers, group.group = object(), SimpleNamespace(call=answer, layout=ranks)
    group.score(RowsRef((RankRows("rows", 1),))).result()
    assert (functions.waited, model.waited) == (1, 1)
