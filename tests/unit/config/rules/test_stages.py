"""Rules of stages and estimators, for 96 prompts and 8 ranks."""

from collections.abc import Callable
from typing import Any

import pytest

from mindspeed_rlxf.config.load import resolve
from mindspeed_rlxf.config.schema import RunConfig
from tests.unit.config.conftest import GRPO, WITHOUT_CRITIC

DPO = {
    "training.stage": "ray_online_dpo", "actor_rollout.do_sample": True,
    "actor_rollout.micro_batch_size": 2,
}  # fmt: skip


@pytest.fixture
def config(make_tree: Callable[..., Any]) -> Callable[..., RunConfig]:
    return lambda *arguments: resolve(make_tree(*arguments), "test")


def test_the_stage_sets_keys_that_the_yaml_leaves_out(config):
    keys = ("adv_estimator", "kl_in", "kl_penalty", "advantage_whiten", "loss_normalizer")

    def chosen(**changes: Any) -> list[str]:
        given = {**GRPO, **{key.replace("__", "."): v for key, v in changes.items()}}
        algorithm = config(given, WITHOUT_CRITIC).algorithm
        return [str(getattr(v, "value", v)) for v in (getattr(algorithm, key) for key in keys)]

    ppo = config().algorithm
    assert (ppo.adv_estimator, ppo.kl_in, ppo.kl_penalty.value) == ("gae", "reward", "kl")
    assert ppo.advantage_whiten.value == "batch"
    assert chosen() == ["grpo", "loss", "low_var_kl", "none", "minibatch_tokens"]
    assert chosen(algorithm__adv_estimator="rloo")[1:3] == ["reward", "kl"]
    assert chosen(algorithm__adv_estimator="dr_grpo")[4] == "sequence_sums"
    assert chosen(actor_rollout__policy_loss="gspo")[4] == "sequence_means"
    reinforce = chosen(
        algorithm__adv_estimator="reinforce_plus_plus_baseline", algorithm__kl_in="reward"
    )
    assert reinforce[2:4] == ["kl", "batch"]
    assert config(DPO, WITHOUT_CRITIC).actor_rollout.n_samples_per_prompt == 2


@pytest.mark.parametrize(
    ("given", "low", "high"),
    [
        ({}, 3e-4, 4e-4),  # arXiv:2507.18071, section 5.1
        ({"clip_ratio_high": 0.1}, 3e-4, 0.1),
        ({"clip_ratio_low": 0.1}, 0.1, 4e-4),
        ({"clip_ratio": 0.2}, None, None),  # clip_ratio holds on both sides
        ({"clip_ratio": 0.2, "clip_ratio_high": 0.3}, None, 0.3),
        ({"policy_loss": "ppo"}, None, None),
    ],
)
def test_gspo_has_a_clip_range_of_its_own(config, given, low, high):
    changes = {f"actor_rollout.{key}": v for key, v in {"policy_loss": "gspo", **given}.items()}
    actor = config({**GRPO, **changes}, WITHOUT_CRITIC).actor_rollout
    assert (actor.clip_ratio, actor.clip_ratio_low, actor.clip_ratio_high) == (0.2, low, high)


REMAX = {**GRPO, "algorithm.adv_estimator": "remax"}
FULL = {"algorithm.kl_penalty": "full"}
DYNAMIC = {**GRPO, "algorithm.filter_groups": True}
CASES: list[tuple[dict[str, Any], list[str]]] = [
    ({**GRPO, "algorithm.adv_estimator": "gae"}, ["algorithm.adv_estimator=gae"]),
    ({"algorithm.adv_estimator": "reinforce_plus_plus"},
     ["algorithm.adv_estimator=reinforce_plus_plus"]),
    ({**GRPO, "actor_rollout.n_samples_per_prompt": 1}, ["actor_rollout.n_samples_per_prompt=1"]),
    ({**GRPO, "algorithm.kl_penalty": "kl"}, ["algorithm.kl_penalty=kl"]),
    ({"critic.warmup_iters": 3}, ["critic.warmup_iters=3"]),
    ({"critic.warmup_iters": 2, "critic.freeze_after": 1}, ["critic.freeze_after=1"]),
    ({"critic.freeze": "attention"}, []),
    ({"critic.freeze": "attention", "critic.lora.rank": 4}, ["critic.freeze=attention"]),
    ({"critic.freeze": "attention", "critic.backend": "fsdp"}, ["critic.freeze=attention"]),
    ({**GRPO, "algorithm.overlong_buffer_len": 17}, ["algorithm.overlong_buffer_len=17"]),
    ({**GRPO, "algorithm.rollout_is_threshold": 2.0, "algorithm.old_log_probs": "rollout"},
     ["algorithm.rollout_is_threshold=2"]),
    ({**GRPO, "training.global_batch_size": 18, "actor_rollout.ppo_mini_batch_size": 24},
     ["training.global_batch_size=18"]),
    ({**REMAX, "training.global_batch_size": 18, "actor_rollout.ppo_mini_batch_size": 24},
     ["training.global_batch_size=18"]),
    (DYNAMIC, []),
    ({**DYNAMIC, "reward.kind": "model", "placement.reward": "main"},
     ["algorithm.filter_groups=true"]),
    ({**DYNAMIC, "algorithm.adv_estimator": "reinforce_plus_plus"},
     ["algorithm.filter_groups=true"]),
    ({**GRPO, "actor_rollout.clip_ratio_c": 1.0}, ["actor_rollout.clip_ratio_c=1.0"]),
    ({**DPO, "actor_rollout.n_samples_per_prompt": 4}, ["actor_rollout.n_samples_per_prompt=4"]),
    ({**DPO, "actor_rollout.micro_batch_size": 3}, ["actor_rollout.micro_batch_size=3"]),
    ({**DPO, "actor_rollout.max_tokens_per_micro_batch": 24},
     ["actor_rollout.max_tokens_per_micro_batch=24"]),
    (FULL, []),
    ({**FULL, "placement.ref": "refs", "resource_pool": {"main": 8, "refs": 8}},
     ["algorithm.kl_penalty=full"]),
    ({**FULL, "ref.tensor_model_parallel_size": 2}, ["ref.tensor_model_parallel_size=2"]),
    ({**FULL, "algorithm.kl_in": "loss"}, ["algorithm.kl_penalty=full"]),
    ({**DPO, "algorithm.kl_ctrl.kl_coef": 0.2}, ["algorithm.kl_ctrl"]),
    ({"ref.vocab_size": 40}, ["ref:"]),
    ({**GRPO, "training.stage": "RAY_GRPO"}, ["training.stage='RAY_GRPO'"]),
]  # fmt: skip


def test_keys_that_do_not_go_with_the_stage_are_refused(check_cases):
    check_cases(CASES)


WITHOUT_EFFECT: list[tuple[dict[str, Any], dict[str, Any]]] = [
    (GRPO, {"algorithm.gamma": 0.9, "algorithm.whiten_rewards": True, "algorithm.lam": 0.5,
            "algorithm.critic_lam": 1.0, "algorithm.lam_alpha": 0.05,
            "algorithm.score_position": "eos"}),
    ({"algorithm.critic_lam": 1.0, "algorithm.lam_alpha": 0.05}, {"algorithm.lam": 0.5}),
    (REMAX, {"algorithm.gamma": 0.9}),
    ({}, {"actor_rollout.dpo_beta": 0.2, "algorithm.kl_ctrl.horizon": 5,
          "algorithm.kl_ctrl.target_kl": 1.0, "algorithm.overlong_penalty_factor": 0.5,
          "algorithm.max_num_gen_batches": 3}),
    ({"actor_rollout.clip_ratio_low": 0.1, "actor_rollout.clip_ratio_high": 0.3},
     {"actor_rollout.clip_ratio": 0.5}),
    (DPO, {"algorithm.max_num_gen_batches": 3, "algorithm.score_slot_limit": "batch_width",
           "algorithm.kl_penalty": "abs", "algorithm.gamma": 0.9,
           "algorithm.adv_estimator": "remax", "algorithm.loss_normalizer": "sequence_sums",
           "algorithm.whiten_rewards": True, "actor_rollout.entropy_coeff": 0.1,
           "actor_rollout.policy_loss": "gspo", "actor_rollout.clip_ratio": 0.3}),
]  # fmt: skip


def test_a_key_that_the_method_does_not_read_is_refused(check_cases):
    cases = []
    for changes, keys in WITHOUT_EFFECT:
        for key, value in keys.items():
            shown = "true" if value is True else value
            cases.append(({**changes, key: value}, [f"{key}={shown} has no effect"]))
    check_cases(cases)


@pytest.mark.parametrize("stage", ["grpo", "ray_gpro", ""])
@pytest.mark.parametrize("without", [(), WITHOUT_CRITIC])
def test_an_unknown_stage_is_the_only_error(problems, stage, without):
    (problem,) = problems({"training.stage": stage}, without)
    assert problem.startswith(f"training.stage={stage!r} must be ")


@pytest.mark.parametrize("changes", [GRPO, DPO])
def test_a_stage_without_a_critic_names_the_keys_to_remove(problems, changes):
    section, place = problems(changes)
    assert "('~critic' on the command line)" in section
    assert place.startswith("placement.critic") and "'~placement.critic'" in place
