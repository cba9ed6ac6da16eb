"""Values that follow from other keys."""

import pytest

from mindspeed_rlxf.config.enums import OldLogProbs, Role
from mindspeed_rlxf.config.load import resolve, resolve_with_notes


@pytest.mark.parametrize(
    ("size", "device", "nodes"),
    [(2, {}, [2]), (16, {}, [8, 8]), (16, {"device.devices_per_node": 16}, [16]),
     ([4, 4], {"device.devices_per_node": 2}, [4, 4])],
)  # fmt: skip
def test_a_count_beyond_one_host_fills_whole_hosts(make_tree, size, device, nodes):
    changes = {"resource_pool.main": size, "runtime.address": "head:6379", **device}
    assert resolve(make_tree(changes), "test").resource_pool == {"main": nodes}


NO_PENALTY = {"algorithm.kl_ctrl.kl_coef": 0.0}
PAIRS = {
    "training.stage": "ray_online_dpo", "actor_rollout.do_sample": True,
    "actor_rollout.micro_batch_size": 2, "algorithm": {},
}  # fmt: skip
NO_CRITIC = ("critic", "placement.critic")


@pytest.mark.parametrize(
    ("changes", "drop", "runs"),
    [({}, (), True), (NO_PENALTY, (), False),
     ({**NO_PENALTY, "algorithm.kl_penalty": "full"}, (), False),
     ({**NO_PENALTY, "logging.reference_kl": True}, (), True),
     ({**NO_PENALTY, **PAIRS}, NO_CRITIC, True)],
)  # fmt: skip
def test_a_reference_runs_only_where_something_reads_it(make_tree, changes, drop, runs):
    config = resolve(make_tree(changes, drop), "test")
    assert (Role.REF in config.roles) == runs


ONE_STEP = {"actor_rollout.ppo_mini_batch_size": 96, "actor_rollout.ppo_epochs": 1}
AT_ONCE = {**NO_PENALTY, **ONE_STEP}


@pytest.mark.parametrize(
    ("changes", "source"),
    [
        (AT_ONCE, OldLogProbs.AUTO),
        ({**AT_ONCE, "logging.reference_kl": True}, OldLogProbs.AUTO),
        ({**ONE_STEP, "algorithm.kl_in": "loss"}, OldLogProbs.AUTO),
        ({**AT_ONCE, "algorithm.old_log_probs": "recompute"}, OldLogProbs.RECOMPUTE),
        ({**AT_ONCE, "algorithm.old_log_probs": "rollout"}, OldLogProbs.ROLLOUT),
        ({**AT_ONCE, "actor_rollout.ppo_epochs": 2}, OldLogProbs.RECOMPUTE),
        ({**AT_ONCE, "actor_rollout.ppo_mini_batch_size": 48}, OldLogProbs.RECOMPUTE),
        (ONE_STEP, OldLogProbs.RECOMPUTE),  # the KL is in the reward
        ({**AT_ONCE, "algorithm.rollout_is_threshold": 2.0}, OldLogProbs.RECOMPUTE),
        ({**AT_ONCE, "algorithm.max_log_prob_gap": 0.5}, OldLogProbs.RECOMPUTE),
        ({**PAIRS, "actor_rollout.ppo_mini_batch_size": 48}, OldLogProbs.AUTO),
    ],
)
def test_a_pass_for_old_log_probs_is_made_where_something_reads_it(make_tree, changes, source):
    drop = NO_CRITIC if "training.stage" in changes else ()
    assert resolve(make_tree(changes, drop), "test").old_log_probs is source


def test_a_pool_of_an_absent_reference_is_not_made(make_tree):
    own = {"resource_pool.refs": 8, "placement.ref": "refs"}
    assert set(resolve(make_tree(own), "test").resource_pool) == {"main", "refs"}
    config, notes = resolve_with_notes(make_tree({**own, **NO_PENALTY}), "test")
    assert set(config.resource_pool) == {"main"}
    assert "resource_pool.refs=[8]: not used, as no reference runs" in notes
    # A rule needs a pool that is not split: the critic's, where the reference is absent.
    split = {
        **own, "actor_rollout.num_gpus_for_train": 4, "actor_rollout.num_gpus_for_infer": 4,
        "placement.critic": "values", "resource_pool.values": 8,
    }  # fmt: skip
    assert resolve(make_tree(split), "test").placement[Role.REWARD] == "refs"
    assert resolve(make_tree({**split, **NO_PENALTY}), "test").placement[Role.REWARD] == "values"
