"""A key without effect is noted with its value and the condition that it needs."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest

from mindspeed_rlxf.config.load import resolve_with_notes

MakeTree = Callable[..., dict[str, Any]]
Changes = dict[str, Any]

ACTOR, CRITIC, REF = "actor_rollout.", "critic.", "ref."
ADAPTIVE = {"algorithm.kl_ctrl": {"type": "adaptive", "kl_coef": 0.0, "horizon": 5}}
LOCAL = {"runtime.kind": "local", "resource_pool.main": 1}
JOINED = {"runtime.address": "head:6379"}
MODEL = {"reward": {"kind": "model", "rules": {"a": "gsm8k"}}, "placement.reward": "main"}
NEVER = {"validation.before": False, "validation.after": False}
VALIDATES = {"data.val_files": "val.jsonl"}
GRPO = {"training.stage": "ray_grpo", f"{ACTOR}do_sample": True, f"{ACTOR}n_samples_per_prompt": 4}
LLAMA3 = {"rope_scaling_type": "llama3", "original_max_position_embeddings": 8}
DOES_NOT_JOIN = "without a cluster that is joined (runtime.address)"

# (change, the line, what gives the key its effect)
CASES: list[tuple[Changes, str, Changes]] = [
    (
        {f"{ACTOR}temperature": 0.5, f"{ACTOR}top_k": 5, f"{ACTOR}top_p": 0.5},
        "actor_rollout.temperature=0.5, actor_rollout.top_k=5, actor_rollout.top_p=0.5: no effect "
        "with actor_rollout.do_sample=false",
        {f"{ACTOR}do_sample": True},
    ),
    (
        {"reward": {"kind": "rule", "load": "/nowhere", "micro_batch_size": 7}},
        "reward.load='/nowhere', reward.micro_batch_size=7: no effect with reward.kind=rule",
        {"reward.kind": "model", "placement.reward": "main"},
    ),
    (
        {"model.small.low_freq_factor": 3.0},
        "model.small.low_freq_factor=3.0: no effect with rope_scaling_type=null",
        {f"model.small.{key}": value for key, value in LLAMA3.items()},
    ),
    (
        {"ref.rope_scaling_type": "linear", "ref.high_freq_factor": 3.0},
        "ref.high_freq_factor=3.0: no effect with rope_scaling_type=linear",
        {f"ref.{key}": value for key, value in LLAMA3.items()},
    ),
    (
        {"training.sequence_parallel": True},
        "training.sequence_parallel=true: no effect with tensor_model_parallel_size=1",
        {"ref.tensor_model_parallel_size": 2},  # for one of its roles
    ),
    (
        {f"{ACTOR}micro_batch_size": 2, f"{ACTOR}max_tokens_per_micro_batch": 99},
        "actor_rollout.micro_batch_size=2: no effect with max_tokens_per_micro_batch=99",
        {f"{ACTOR}max_tokens_per_micro_batch": None},
    ),
    (
        {f"{CRITIC}min_lr": 1e-9},
        "critic.min_lr=1e-09: no effect with lr_decay_style=constant",
        {f"{CRITIC}lr_decay_style": "cosine"},
    ),
    ({"training.max_skipped": 2}, "training.max_skipped=2: no effect with "
     "training.nan_policy=raise", {"training.nan_policy": "skip"}),
    ({"training.resume": "never", "training.new_run": True}, "training.resume='never': no effect "
     "with training.new_run=true", {"training.new_run": False}),
    ({"critic.recompute_num_layers": 2}, "critic.recompute_num_layers=2: no effect with "
     "recompute=none", {"critic.recompute": "full"}),
    ({"logging.reference_kl": True}, "logging.reference_kl=true: no effect where a reward or a "
     "loss reads the reference anyway", {"algorithm.kl_ctrl.kl_coef": 0.0}),
    ({"training.async_save": True, "training.save_interval_s": 0.0}, "training.async_save=true: no "
     "effect without a save before the last iteration", {"training.save_interval": 2}),
    (
        {"data.train_files": None, "data.data_path": "a", "data.system_prompt": "x"},
        "data.system_prompt='x': no effect with indexed data sets, whose prompts are tokenized "
        "already",
        {"data.val_files": "val.jsonl"},
    ),
    ({"validation.max_samples": 4}, "validation.max_samples=4: no effect without data.val_files or "
     "data.val_data_path", VALIDATES),
    (
        {**VALIDATES, **NEVER, "data.val_files": "/val.jsonl"},
        "data.val_files=['/val.jsonl']: no effect with validation.interval=0, before=false and "
        "after=false",
        {"validation.interval": 2},
    ),
    (
        {**VALIDATES, "validation.top_k": 4, "validation.temperature": 0.5},
        "validation.temperature=0.5, validation.top_k=4: no effect with validation.do_sample=false",
        {"validation.do_sample": True},
    ),
    (
        {**VALIDATES, "validation.only": True, "validation.before": False},
        "validation.before=false: no effect with validation.only=true",
        {"validation.only": False},
    ),
    (
        {"algorithm.score_position": "eos", "algorithm.score_slot_limit": "batch_width"},
        "algorithm.score_slot_limit='batch_width': no effect with algorithm.score_position=eos",
        {"algorithm.score_position": "after_eos"},
    ),
    (
        ADAPTIVE,
        "algorithm.kl_ctrl.type='adaptive', algorithm.kl_ctrl.horizon=5: no effect with "
        "algorithm.kl_ctrl.kl_coef=0, which stays 0",
        {"algorithm.kl_ctrl.kl_coef": 0.1},
    ),
    (MODEL, "reward.rules={'a': 'gsm8k'}: no effect with reward.kind=model and no validation "
     "prompts", VALIDATES),
    (
        {**LOCAL, "training.max_restarts": 1, "resource_pool.env": {"A": "b"},
         "device.resource_name": "x", "runtime.address": "head:1", "runtime.start_timeout_s": 9.0},
        "training.max_restarts=1, resource_pool.env={'A': 'b'}, device.resource_name='x', "
        "runtime.address='head:1', runtime.start_timeout_s=9.0: no effect with runtime.kind=local",
        {"runtime.kind": "ray"},
    ),
    ({**JOINED, "training.max_restarts": 0, "training.allow_shrink": True},
     "training.allow_shrink=true: no effect with training.max_restarts=0",
     {"training.max_restarts": 1}),
    (
        {"training.node_wait_s": 9.0, "device.devices_per_node": 4, "resource_pool.wait_s": 9.0,
         "resource_pool.bad_nodes": "leave_out"},
        "training.node_wait_s=9.0, device.devices_per_node=4, resource_pool.wait_s=9.0, "
        "resource_pool.bad_nodes='leave_out': no effect "
        f"{DOES_NOT_JOIN}",
        JOINED,
    ),
    ({"resource_pool.tensor_parallel_spans_nodes": True}, "resource_pool."
     "tensor_parallel_spans_nodes=true: no effect with pools of one node each",
     {"resource_pool.main": [4, 4]}),
    (
        {f"{ACTOR}do_sample": True, f"{ACTOR}top_k": 3, f"{ACTOR}min_new_tokens": 2,
         f"{ACTOR}fixed_responses": "given.jsonl"},
        "actor_rollout.top_k=3, actor_rollout.min_new_tokens=2: no effect with "
        "actor_rollout.fixed_responses",
        {f"{ACTOR}fixed_responses": None},
    ),
]  # fmt: skip


@pytest.mark.parametrize(("changes", "line", "mended"), CASES, ids=[c[1][:40] for c in CASES])
def test_an_unused_key_is_noted_until_its_condition_is_met(
    make_tree: MakeTree, changes: Changes, line: str, mended: Changes
) -> None:
    keys = set(re.findall(r"(?:^|, )([a-z_.]+)=", line.partition(": no effect")[0]))
    assert keys and keys <= unused(make_tree(changes))
    assert not keys & unused(make_tree({**changes, **mended}))


def unused(tree: dict[str, Any]) -> set[str]:
    """The keys in lines of keys without effect."""
    notes = resolve_with_notes(tree, "test")[1]
    lines = [note.partition(": no effect")[0] for note in notes if ": no effect" in note]
    return {key for line in lines for key in re.findall(r"(?:^|, )([a-z_.]+)=", line)}


def test_keys_of_a_role_that_the_run_does_not_have_are_noted(make_tree: MakeTree) -> None:
    shared = {"training.cliprange_value": 0.5, "model.small.critic_update_epochs": 2}
    unused = {"model.other": {"num_layers": 2}}
    tree = make_tree({**GRPO, **shared, **unused}, ("critic", "placement.critic"))
    assert resolve_with_notes(tree, "test")[1] == [
        "model.small.critic_update_epochs=2, training.cliprange_value=0.5: no role of this run "
        "reads it",
    ]
    assert resolve_with_notes(make_tree(shared), "test")[1] == []


def test_an_explicit_default_is_not_noted(make_tree: MakeTree) -> None:
    tree = make_tree({f"{ACTOR}temperature": 1.0, "model.small.low_freq_factor": 1.0})
    assert resolve_with_notes(tree, "test")[1] == []
