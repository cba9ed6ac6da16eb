"""Values that follow from other keys."""

import pytest

from mindspeed_rlxf.checkpoint.directory import RunDirectory
from mindspeed_rlxf.config.enums import OldLogProbs, Role
from mindspeed_rlxf.config.keys import to_yaml
from mindspeed_rlxf.config.load import resolve, resolve_with_notes
from mindspeed_rlxf.config.problems import ConfigError


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


def limits_of(config):
    """Token limits of the passes of actor, reference and critic; None = by samples."""
    roles = (Role.ACTOR_ROLLOUT, Role.REF, Role.CRITIC)
    return [config.role(role).max_tokens_per_micro_batch for role in roles if config.role(role)]


LONGER = {
    "model.small.max_position_embeddings": 10_000, "training.seq_length": 9000,
    "actor_rollout.max_prompt_length": 8,
}  # fmt: skip
BALANCED = {"model.small.num_experts": 4, "model.small.moe_aux_loss_coeff": 0.01}


@pytest.mark.parametrize(
    ("changes", "limits"),
    [
        ({}, [8192, 8192, 8192]),
        (LONGER, [9000, 9000, 9000]),
        ({"training.micro_batch_size": 1}, [None, None, None]),
        ({"actor_rollout.micro_batch_size": 2}, [None, 8192, 8192]),
        ({"critic.max_tokens_per_micro_batch": 50}, [8192, 8192, 50]),
        ({"critic.max_tokens_per_micro_batch": None}, [8192, 8192, None]),
        # as those where a micro-batch is more than a sum over its samples
        ({"critic.packed_sequences": False}, [8192, 8192, None]),
        ({"algorithm.loss_normalizer": "micro_batch_mean"}, [None, 8192, None]),
        (BALANCED, [None, 8192, None]),
        # or would leave stages of a pipeline idle
        ({"critic.pipeline_model_parallel_size": 2}, [8192, 8192, None]),
    ],
)
def test_passes_are_filled_with_tokens_unless_sizes_are_given(make_tree, changes, limits):
    assert limits_of(resolve(make_tree(changes), "test")) == limits


def test_pairs_stay_in_one_pass(make_tree):
    tree = make_tree(PAIRS, NO_CRITIC)
    del tree["actor_rollout"]["micro_batch_size"]
    with pytest.raises(ConfigError, match=r"actor_rollout\.micro_batch_size=1"):  # not by tokens
        resolve(tree, "test")


def test_a_run_that_began_with_samples_in_each_pass_goes_on_so(make_tree, tmp_path):
    """A run of an older version, whose command gives no sizes."""
    folder = {"training.output_dir": str(tmp_path)}
    sizes = {"training.micro_batch_size": 1, "ref.micro_batch_size": 4}
    earlier = resolve(make_tree({**sizes, **folder}), "test")
    (tmp_path / "config.yaml").write_text(to_yaml(earlier), encoding="utf-8")
    resumed, notes = resolve_with_notes(make_tree(folder), "test")
    assert limits_of(resumed) == [None, None, None]
    assert any("ref.micro_batch_size=4" in note for note in notes)
    assert RunDirectory(tmp_path).compare_with(resumed) == []
    new = {"training.new_run": True, **folder}
    assert limits_of(resolve(make_tree(new), "test")) == [8192] * 3
    given = {"training.max_tokens_per_micro_batch": 64, **folder}
    (tmp_path / "config.1.yaml").write_text(to_yaml(resolve(make_tree(given), "test")))
    assert limits_of(resolve(make_tree(folder), "test")) == [8192] * 3
    (tmp_path / "config.1.yaml").write_text("actor_rollout: of another program")
    (tmp_path / "config_mine.yaml").write_text(to_yaml(earlier))
    assert limits_of(resolve(make_tree(folder), "test")) == [8192] * 3
