"""Rules and derived values of `rollout.max_staleness`."""

import pytest

from mindspeed_rlxf.config.load import resolve

SPLIT = {
    "resource_pool.other": 8, "placement.ref": "other", "placement.critic": "other",
    "placement.reward": "other", "actor_rollout.num_gpus_for_train": 4,
    "actor_rollout.num_gpus_for_infer": 4,
}  # fmt: skip


@pytest.mark.parametrize(
    ("changes", "lead"),
    [
        ({}, 0),
        (SPLIT, 0),
        ({"rollout.max_staleness": 3}, 0),
        ({**SPLIT, "rollout.max_staleness": 1}, 1),
        ({**SPLIT, "rollout.max_staleness": 3}, 1),
        ({**SPLIT, "rollout.max_staleness": 3, "rollout.lead": 0}, 0),
        ({"rollout.max_staleness": 3, "rollout.lead": 1}, 1),
    ],
)
def test_generation_leads_in_disaggregated_placement(make_tree, changes, lead):
    assert resolve(make_tree(changes), "test").lead == lead


AHEAD = {"rollout.max_staleness": 1}
TOGETHER = {
    "algorithm.kl_ctrl.kl_coef": 0.0, "actor_rollout.ppo_mini_batch_size": 96,
    "actor_rollout.ppo_epochs": 1,
}  # fmt: skip
PAIRS = {
    "training.stage": "ray_online_dpo", "actor_rollout.do_sample": True,
    "actor_rollout.micro_batch_size": 2, "algorithm": {},
}  # fmt: skip
ROLLOUT = {"algorithm.old_log_probs": "rollout"}


@pytest.mark.parametrize(
    ("changes", "source", "threshold"),
    [
        (TOGETHER, "auto", None),
        ({**TOGETHER, **AHEAD}, "recompute", 2.0),
        ({**AHEAD, "algorithm.rollout_is_threshold": 5.0}, "recompute", 5.0),
        ({**AHEAD, **ROLLOUT}, "rollout", None),
        ({**AHEAD, **PAIRS}, "auto", None),  # whose loss has no ratio
    ],
)
def test_samples_of_older_weights_are_corrected(make_tree, changes, source, threshold):
    drop = ("critic", "placement.critic") if "training.stage" in changes else ()
    config = resolve(make_tree(changes, drop), "test")
    assert config.old_log_probs.value == source
    assert config.algorithm.rollout_is_threshold == threshold


VLLM, HF = {"rollout.engine": "vllm"}, {"rollout.engine": "transformers"}


@pytest.mark.parametrize(
    ("changes", "keys"),
    [
        ({**AHEAD, "algorithm.rollout_is_threshold": None}, ["algorithm.rollout_is_threshold"]),
        (
            {**TOGETHER, **AHEAD, "algorithm.rollout_is_threshold": None},  # not the update's own
            ["algorithm.rollout_is_threshold"],
        ),
        ({**AHEAD, "algorithm.max_log_prob_gap": 1.0}, ["algorithm.max_log_prob_gap=1.0"]),
        ({**AHEAD, "logging.stop_on": ["log_prob_gap"]}, ["logging.stop_on="]),
        ({"rollout.lead": 1}, ["rollout.lead=1"]),
        ({**AHEAD, "actor_rollout.fixed_responses": "f.jsonl"}, ["rollout.max_staleness=1"]),
        ({**AHEAD, **HF}, ["rollout.max_staleness=1"]),
        ({**AHEAD, **HF, **SPLIT}, []),
        ({**AHEAD, **VLLM}, []),
        ({**VLLM, **SPLIT, "rollout.max_staleness": 2}, []),
        ({**HF, **SPLIT, "rollout.max_staleness": 2}, ["rollout.max_staleness=2"]),
        ({**SPLIT, "rollout.max_staleness": 2}, []),
        ({"algorithm.rollout_is_low": 0.5}, ["algorithm.rollout_is_low=0.5"]),
        ({**AHEAD, "algorithm.rollout_is_low": 0.5}, []),
    ],
)
def test_what_does_not_go_with_older_weights_is_refused(check_case, changes, keys):
    check_case(changes, keys)
