"""Rules of batch, mini-batch and micro-batch sizes, for 96 samples, 8 ranks and 4 layers."""

import itertools
import re
from collections.abc import Callable
from typing import Any

import pytest

from mindspeed_rlxf.config.estimator_traits import TRAITS, EstimatorTraits
from tests.unit.config.conftest import WITHOUT_CRITIC

Problems = Callable[..., list[str]]

ACTOR_MINI, CRITIC_MINI = "actor_rollout.ppo_mini_batch_size", "critic.critic_mini_batch_size"
TWO_PER_PROMPT = {
    "training.global_batch_size": 10, "actor_rollout.do_sample": True, ACTOR_MINI: 8,
    CRITIC_MINI: 8, "actor_rollout.n_samples_per_prompt": 2,
}  # fmt: skip
BUDGET = {"training.max_tokens_per_micro_batch": 24, "training.micro_batch_size": 7}
VIRTUAL = {
    "critic.pipeline_model_parallel_size": 2,
    "critic.num_layers_per_virtual_pipeline_stage": 1,
}
STAGES = {
    "actor_rollout.pipeline_model_parallel_size": 2,
    "actor_rollout.num_layers_per_virtual_pipeline_stage": 1,
}
PAIRS = {
    "training.stage": "ray_online_dpo", "actor_rollout.do_sample": True,
    "resource_pool.main": 2,
}  # fmt: skip
SEVEN_PAIRS = {
    **PAIRS, "training.global_batch_size": 7, "actor_rollout.micro_batch_size": 2, ACTOR_MINI: 4,
}  # fmt: skip
NULL = {"critic.micro_batch_size": None}

CASES: dict[str, tuple[dict[str, Any], list[str]]] = {
    "batch fills every data-parallel rank": ({"training.global_batch_size": 100, ACTOR_MINI: 8,
     CRITIC_MINI: 8}, ["training.global_batch_size=100"]),
    "remedy for the batch suits all roles": ({"resource_pool": {"main": 4, "critics": 6},
     "placement.critic": "critics", "training.global_batch_size": 100, ACTOR_MINI: 4,
     CRITIC_MINI: 6}, ["training.global_batch_size=100 use 96 or 108"]),
    "a rule scores any number of samples": ({"resource_pool": {"main": 8, "reward": 5}}, []),
    "samples per prompt count towards the batch: 40": ({**TWO_PER_PROMPT,
     "actor_rollout.n_samples_per_prompt": 4}, []),
    "samples per prompt count towards the batch: 20": (TWO_PER_PROMPT,
     ["training.global_batch_size=10"]),
    "mini-batch divides the samples": ({ACTOR_MINI: 40}, ["actor_rollout.ppo_mini_batch_size=40"]),
    "a micro-batch that does not fill a valid mini-batch is changed": ({"critic.micro_batch_size":
     3}, ["critic.critic_mini_batch_size=32 use critic.micro_batch_size=2"]),
    "also where no mini-batch suits the micro-batch": ({"critic.micro_batch_size": 5},
     ["critic.critic_mini_batch_size=32 use critic.micro_batch_size=4"]),
    "mini-batch and micro-batch are changed together": ({"critic.micro_batch_size": 5,
     CRITIC_MINI: 40}, ["critic.critic_mini_batch_size=40 use 32 with critic.micro_batch_size=4"]),
    "token budget replaces the micro-batch": (BUDGET, []),
    "token budget leaves the mini-batch to the replicas": ({**BUDGET, CRITIC_MINI: 12},
     ["critic.critic_mini_batch_size=12"]),
    "token budget does not concern a rule": ({"reward.max_tokens_per_micro_batch": 1}, []),
    "virtual pipeline takes as many micro-batches as stages": ({**VIRTUAL,
     "critic.micro_batch_size": 4}, []),
    "virtual pipeline with too few micro-batches": ({**VIRTUAL, "critic.micro_batch_size": 8},
     ["critic.critic_mini_batch_size=32"]),
    "virtual pipeline with a token budget": ({**VIRTUAL, "critic.max_tokens_per_micro_batch": 24,
     CRITIC_MINI: 12}, ["critic.critic_mini_batch_size=12"]),
    "one chunk is no virtual pipeline": ({**VIRTUAL,
     "critic.num_layers_per_virtual_pipeline_stage": 2, "critic.micro_batch_size": 8}, []),
    "batch fills a virtual pipeline": ({"resource_pool": {"main": 2, "reward": 1},
     "training.global_batch_size": 9, ACTOR_MINI: 9,
     "actor_rollout.pipeline_model_parallel_size": 2, CRITIC_MINI: 2, **VIRTUAL,
     **{key.replace("critic", "ref"): value for key, value in VIRTUAL.items()}},
     ["training.global_batch_size=9"]),
    "batch of seven pairs on two devices": (SEVEN_PAIRS, ["training.global_batch_size=7"]),
    "batch of eight pairs on two devices": ({**SEVEN_PAIRS, "training.global_batch_size": 8}, []),
    "null samples beside a token limit": ({**NULL, "critic.max_tokens_per_micro_batch": 24}, []),
    "null samples alone": (NULL, ["critic.micro_batch_size=null"]),
    "token budget holds the longest sample": ({"ref.max_tokens_per_micro_batch": 23},
     ["ref.max_tokens_per_micro_batch=23"]),
    "token budget needs packing": ({"critic.max_tokens_per_micro_batch": 24,
     "training.packed_sequences": False}, ["critic.max_tokens_per_micro_batch=24"]),
    "mean of micro-batch means needs micro-batches of one size": (
        {"critic.max_tokens_per_micro_batch": 24, "algorithm.loss_normalizer": "micro_batch_mean"},
        ["algorithm.loss_normalizer=micro_batch_mean"],
    ),
}  # fmt: skip


def test_sizes_of_batches_are_refused_with_both_numbers_and_a_remedy(check_cases):
    check_cases(CASES.values())


@pytest.mark.parametrize(
    ("prompts", "per_prompt", "expected"), [(9, 2, []), (8, 3, ["training.global_batch_size=8"])]
)
def test_whole_groups_are_divided_by_the_ranks_that_compare_them(
    check_case, monkeypatch, prompts, per_prompt, expected
):
    """Actor DP 2, critic DP 3; the critic's ranks compare the responses to a prompt."""
    both = EstimatorTraits(needs_critic=True, compares_group=True)
    monkeypatch.setitem(TRAITS, "group_baseline", both)
    changes = {
        "resource_pool": {"main": 2, "critics": 3}, "placement.critic": "critics",
        "algorithm.adv_estimator": "group_baseline", "actor_rollout.do_sample": True,
        "actor_rollout.n_samples_per_prompt": per_prompt, "training.global_batch_size": prompts,
        ACTOR_MINI: 2, CRITIC_MINI: 3,
    }  # fmt: skip
    check_case(changes, expected)


def rounds(problems: Problems, changes: dict[str, Any], drop: tuple[str, ...] = ()) -> int:
    """How often the first remedy of every problem has to be followed until none is left."""
    changes = dict(changes)
    for count in range(4):
        found = problems(changes, drop)
        if not found:
            return count
        for problem in found:
            key, _, rest = problem.partition("=")
            remedy = rest.rpartition("; ")[2]
            named = re.findall(r"(\w+\.\w+)=(\d+)", remedy)
            if first := re.match(r"use (\d+)", remedy):
                changes[key.split()[0]] = int(first[1])
            changes |= {name: int(number) for name, number in named}
    return 99


@pytest.mark.parametrize("stages", [{}, STAGES])
def test_remedies_of_pairs_agree(problems, stages):
    for prompts, micro, mini in itertools.product([7, 8, 9], [1, 2, 3], [1, 4, 7]):
        changes = {
            **PAIRS, **stages, "training.global_batch_size": prompts,
            "actor_rollout.micro_batch_size": micro, "actor_rollout.ppo_mini_batch_size": mini,
        }  # fmt: skip
        # One round mends all, or one for the batch and one for what is cut from it.
        assert rounds(problems, changes, WITHOUT_CRITIC) <= 2, changes
