"""How samples may be cut up; the tree has 96 samples, 8 ranks and 4 layers."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest

Problems = Callable[..., list[str]]


def test_batch_must_fill_every_data_parallel_rank(problems: Problems) -> None:
    changes = {"training.global_batch_size": 100, "actor_rollout.ppo_mini_batch_size": 8}
    changes["critic.critic_mini_batch_size"] = 8
    assert problems(changes) == [
        "training.global_batch_size=100 must be a multiple of the actor's data-parallel size 8; "
        "use 96 or 104"
    ]


def test_batch_remedy_is_good_for_all_roles(problems: Problems) -> None:
    """DP 2 x 3 = 6 ranks for the critic with TP 1, DP 4 for the actor: multiples of 12."""
    changes = {
        "resource_pool": {"main": 4, "critics": 6},
        "placement.critic": "critics",
        "training.global_batch_size": 100,
        "actor_rollout.ppo_mini_batch_size": 4,
        "critic.critic_mini_batch_size": 6,
    }
    assert problems(changes) == [
        "training.global_batch_size=100 must be a multiple of the critic's data-parallel size 6; "
        "use 96 or 108"
    ]


def test_samples_per_prompt_count_towards_the_batch(problems: Problems) -> None:
    changes = {
        "training.global_batch_size": 10,
        "actor_rollout.do_sample": True,
        "actor_rollout.ppo_mini_batch_size": 8,
        "critic.critic_mini_batch_size": 8,
    }
    assert problems({**changes, "actor_rollout.n_samples_per_prompt": 4}) == []  # 40 samples
    (problem,) = problems({**changes, "actor_rollout.n_samples_per_prompt": 2})  # 20 samples
    assert problem == (
        "training.global_batch_size=10 x actor_rollout.n_samples_per_prompt=2 must be a multiple "
        "of the actor's data-parallel size 8; use 8 or 12"
    )


def test_mini_batch_must_divide_the_samples(problems: Problems) -> None:
    assert problems({"actor_rollout.ppo_mini_batch_size": 40}) == [
        "actor_rollout.ppo_mini_batch_size=40 must divide the 96 samples of an iteration "
        "(training.global_batch_size=96 x actor_rollout.n_samples_per_prompt=1); use 32 or 48"
    ]


def test_mini_batch_must_fill_whole_micro_batches(problems: Problems) -> None:
    assert problems({"critic.micro_batch_size": 3}) == [
        "critic.critic_mini_batch_size=32 must be a multiple of 24 (data-parallel size 8 x "
        "critic.micro_batch_size=3); use 24 or 48"
    ]


def test_micro_batch_that_fits_no_mini_batch_has_a_remedy(problems: Problems) -> None:
    """12 samples on a rank: 5 does not divide them, 4 and 6 do."""
    (problem,) = problems({"critic.micro_batch_size": 5})
    assert problem.endswith("no size fits, so use critic.micro_batch_size=4 and a mini-batch of 32")


def test_token_budget_leaves_the_mini_batch_to_the_replicas(problems: Problems) -> None:
    budget = {"training.max_tokens_per_micro_batch": 24, "training.micro_batch_size": 7}
    assert problems(budget) == []
    assert problems({**budget, "critic.critic_mini_batch_size": 12}) == [
        "critic.critic_mini_batch_size=12 must be a multiple of 8 (data-parallel size 8); "
        "use 8 or 16"
    ]


def test_token_budget_does_not_concern_a_rule(problems: Problems) -> None:
    assert problems({"reward.max_tokens_per_micro_batch": 1}) == []


VIRTUAL = {
    "critic.pipeline_model_parallel_size": 2,
    "critic.num_layers_per_virtual_pipeline_stage": 1,
}


def test_virtual_pipeline_takes_as_many_micro_batches_as_stages(problems: Problems) -> None:
    """DP 4: a mini-batch of 32 is 8 a rank, so 4 x 2 or 2 x 4, but not 1 x 8."""
    assert problems({**VIRTUAL, "critic.micro_batch_size": 4}) == []
    assert problems({**VIRTUAL, "critic.micro_batch_size": 8}) == [
        "critic.critic_mini_batch_size=32 must be a multiple of 64 (data-parallel size 4 x 2 "
        "stages of its virtual pipeline x critic.micro_batch_size=8); no size fits, so use "
        "critic.micro_batch_size=6 and a mini-batch of 48"
    ]
    budget = {"critic.max_tokens_per_micro_batch": 24, "critic.critic_mini_batch_size": 12}
    assert problems({**VIRTUAL, **budget}) == [
        "critic.critic_mini_batch_size=12 must be a multiple of 8 (data-parallel size 4 x 2 "
        "stages of its virtual pipeline); use 8 or 16"
    ]


def test_one_chunk_is_no_virtual_pipeline(problems: Problems) -> None:
    one = {**VIRTUAL, "critic.num_layers_per_virtual_pipeline_stage": 2}
    assert problems({**one, "critic.micro_batch_size": 8}) == []


def test_batch_fills_a_virtual_pipeline(problems: Problems) -> None:
    """Nothing else would say that no mini-batch size fits; a frozen role fills up by itself."""
    pools = {"resource_pool": {"main": 2, "reward": 1}, "training.global_batch_size": 9}
    actor = {"actor_rollout.ppo_mini_batch_size": 9}
    actor["actor_rollout.pipeline_model_parallel_size"] = 2
    frozen = {key.replace("critic", "ref"): value for key, value in VIRTUAL.items()}
    critic = {**VIRTUAL, "critic.critic_mini_batch_size": 2}
    (problem,) = problems({**pools, **actor, **frozen, **critic})
    assert problem == (
        "training.global_batch_size=9 must be a multiple of the critic's data-parallel size 1 x 2 "
        "stages of its virtual pipeline; use 8 or 10"
    )


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"ref.max_tokens_per_micro_batch": 23},
            "ref.max_tokens_per_micro_batch=23 must be at least training.seq_length=24, so that "
            "every sample fits; use 24 or more",
        ),
        (
            {"critic.max_tokens_per_micro_batch": 24, "training.packed_sequences": False},
            "critic.max_tokens_per_micro_batch=24 needs training.packed_sequences=true, as padding "
            "would exceed it; remove one of them",
        ),
        (
            {
                "critic.max_tokens_per_micro_batch": 24,
                "algorithm.loss_normalizer": "micro_batch_mean",
            },
            "algorithm.loss_normalizer=micro_batch_mean needs micro-batches of one size, "
            "critic.max_tokens_per_micro_batch=24 makes others; use null there, or "
            "algorithm.loss_normalizer=minibatch_tokens",
        ),
    ],
)
def test_rule_is_named_with_both_numbers_and_a_remedy(
    problems: Problems, changes: dict[str, Any], message: str
) -> None:
    assert message in problems(changes)


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


PAIRS = {
    "training.stage": "ray_online_dpo", "actor_rollout.do_sample": True,
    "resource_pool.main": 2,
}  # fmt: skip
STAGES = {
    "actor_rollout.pipeline_model_parallel_size": 2,
    "actor_rollout.num_layers_per_virtual_pipeline_stage": 1,
}
WITHOUT_CRITIC = ("critic", "placement.critic")


@pytest.mark.parametrize("stages", [{}, STAGES])
@pytest.mark.parametrize("prompts", [7, 8, 9])
@pytest.mark.parametrize("micro", [1, 2, 3])
@pytest.mark.parametrize("mini", [1, 4, 7])
def test_remedies_of_pairs_agree(
    problems: Problems, stages: dict[str, Any], prompts: int, micro: int, mini: int
) -> None:
    changes = {
        **PAIRS, **stages, "training.global_batch_size": prompts,
        "actor_rollout.micro_batch_size": micro, "actor_rollout.ppo_mini_batch_size": mini,
    }  # fmt: skip
    # One round mends all, or one for the batch and one for what is cut from it.
    assert rounds(problems, changes, WITHOUT_CRITIC) <= 2


def test_a_batch_of_seven_on_two_devices_has_one_remedy(problems: Problems) -> None:
    changes = {
        **PAIRS, "training.global_batch_size": 7, "actor_rollout.micro_batch_size": 2,
        "actor_rollout.ppo_mini_batch_size": 4,
    }  # fmt: skip
    assert problems(changes, WITHOUT_CRITIC) == [
        "training.global_batch_size=7 x actor_rollout.n_samples_per_prompt=2 must be a multiple of "
        "the actor's data-parallel size 2 x 2 responses of a pair; use 6 or 8"
    ]
    assert problems({**changes, "training.global_batch_size": 8}, WITHOUT_CRITIC) == []


def test_null_samples_beside_a_token_limit_are_no_error(problems: Problems) -> None:
    null = {"critic.micro_batch_size": None}
    assert problems({**null, "critic.max_tokens_per_micro_batch": 24}) == []
    (problem,) = problems(null)
    assert problem.startswith("critic.micro_batch_size=null must be an integer")


def test_one_token_cannot_be_whitened(problems: Problems) -> None:
    one = {
        "resource_pool.main": 1, "training.global_batch_size": 1, "actor_rollout.max_new_tokens": 1,
        "actor_rollout.ppo_mini_batch_size": 1, "critic.critic_mini_batch_size": 1,
    }  # fmt: skip
    assert problems(one) == [
        "algorithm.advantage_whiten=batch needs two tokens, and one sample with "
        "actor_rollout.max_new_tokens=1 has one; use none, or more samples"
    ]
    assert problems({**one, "algorithm.advantage_whiten": "none"}) == []
