"""Which samples each replica gets in an update, and the order in which rows come back."""

from collections.abc import Callable
from typing import Any

import pytest

from mindspeed_rlxf.cluster.group import RoleGroup
from mindspeed_rlxf.cluster.refs import RankRows, RowsRef
from mindspeed_rlxf.config.enums import Role
from mindspeed_rlxf.config.load import resolve
from mindspeed_rlxf.config.schema import RunConfig
from mindspeed_rlxf.roles.balance import balanced_steps, call_balanced
from mindspeed_rlxf.roles.reports import ResponseLengths
from tests.unit.cluster.test_group import RecordingPool, SomeRole, ref
from tests.unit.config.conftest import WITHOUT_CRITIC, make_tree, no_cluster

__all__ = ["make_tree", "no_cluster"]  # fixtures

MakeTree = Callable[..., dict[str, Any]]
RESPONSES = [9, 8, 1, 2]


def lengths() -> ResponseLengths:
    return ResponseLengths([3] * 4, RESPONSES, [True] * 4)


def not_known() -> ResponseLengths:
    raise AssertionError("waits for the responses")


def config_of(make_tree: MakeTree, changes: dict[str, Any], ranks: int = 2) -> RunConfig:
    small = {
        "resource_pool.main": ranks,
        "training.global_batch_size": 4,
        "actor_rollout.ppo_mini_batch_size": 4,
    }
    changes = {**small, **changes}
    if "training.stage" in changes:
        return resolve(make_tree(changes, WITHOUT_CRITIC), "test")
    return resolve(make_tree({**changes, "critic.critic_mini_batch_size": 4}), "test")


@pytest.mark.parametrize("role", [Role.ACTOR_ROLLOUT, Role.REF, Role.CRITIC])
def test_rows_of_balanced_calls_come_in_the_order_of_the_samples(make_tree, role):
    config, pool = config_of(make_tree, {}), RecordingPool(2)
    group = RoleGroup(role, config.layout(role), pool)
    rows = call_balanced(config, group, SomeRole.work, ref(2, 2), lengths, "all").rows()
    # 9 and 1 to the first replica, 8 and 2 to the second
    assert [r.args for r in pool.requests] == [
        (ref(2, 2).take([0, 2]), "all"),
        (ref(2, 2).take([1, 3]), "all"),
    ]
    pieces = RankRows("rank 0", 2), RankRows("rank 1", 2)
    assert rows == RowsRef(pieces, (0, 2, 1, 3))


OFF = {"actor_rollout.balance_by_length": False}


@pytest.mark.parametrize(("changes", "ranks"), [(OFF, 2), ({}, 1)])
@pytest.mark.parametrize("role", [Role.ACTOR_ROLLOUT, Role.REF])
def test_without_balance_no_call_waits_for_the_responses(make_tree, role, changes, ranks):
    config, pool = config_of(make_tree, changes, ranks), RecordingPool(ranks)
    group = RoleGroup(role, config.layout(role), pool)
    call_balanced(config, group, SomeRole.work, ref(2, 2), not_known)
    parts = ref(2, 2).split(ranks)
    assert [request.args[0] for request in pool.requests] == parts
    steps = balanced_steps(config, Role.ACTOR_ROLLOUT, [[0, 1, 2, 3]], 4, not_known)
    assert [row for share in steps for row in share.rows] == [0, 1, 2, 3]


MEANS = {"algorithm.loss_normalizer": "micro_batch_mean"}
EXPERTS = {"model.small.num_experts": 4, "model.small.moe_aux_loss_coeff": 0.01}
PAIRS = {
    "training.stage": "ray_online_dpo",
    "actor_rollout.do_sample": True,
    "actor_rollout.n_samples_per_prompt": 2,
    "training.global_batch_size": 2,
}
TWO = {"training.micro_batch_size": 2}


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        (TWO, [[0, 2], [1, 3]]),
        ({**TWO, **MEANS}, [[0, 1], [2, 3]]),
        ({**TWO, **EXPERTS}, [[0, 1], [2, 3]]),
        ({**TWO, **PAIRS}, [[0, 1], [2, 3]]),
        ({**TWO, **EXPERTS, "training.max_tokens_per_micro_batch": 64}, [[0, 2], [1, 3]]),
    ],
    ids=["sums", "means of micro-batches", "balanced experts", "pairs", "by tokens"],
)
def test_micro_batches_whose_samples_matter_stay_whole(make_tree, changes, expected):
    config = config_of(make_tree, changes)
    shares = balanced_steps(config, Role.ACTOR_ROLLOUT, [[0, 1, 2, 3]], 4, lengths)
    assert [share.rows for share in shares] == expected
