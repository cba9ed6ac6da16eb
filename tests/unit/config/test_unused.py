"""A key without effect is noted with its value and the condition that it needs."""

import re
from typing import Any

import pytest

from mindspeed_rlxf.config.load import resolve_with_notes
from tests.unit.config.conftest import GRPO, WITHOUT_CRITIC

Changes = dict[str, Any]

ACTOR, CRITIC, REF = "actor_rollout.", "critic.", "ref."
ADAPTIVE = {"algorithm.kl_ctrl": {"type": "adaptive", "kl_coef": 0.0, "horizon": 5}}
LOCAL = {"runtime.kind": "local", "resource_pool.main": 1}
JOINED = {"runtime.address": "head:6379"}
GRAPHS = {**JOINED, "device.kind": "cuda", "rollout.decode_graphs": True}
MODEL = {"reward": {"kind": "model", "rules": {"a": "gsm8k"}}, "placement.reward": "main"}
NEVER = {"validation.before": False, "validation.after": False}
VALIDATES = {"data.val_files": "val.jsonl"}
LLAMA3 = {"rope_scaling_type": "llama3", "original_max_position_embeddings": 8}

# (change, the keys that are noted, what gives them their effect)
CASES: list[tuple[Changes, str, Changes]] = [
    ({f"{ACTOR}temperature": 0.5, f"{ACTOR}top_k": 5, f"{ACTOR}top_p": 0.5},
     "actor_rollout.temperature actor_rollout.top_k actor_rollout.top_p",
     {f"{ACTOR}do_sample": True}),
    ({"reward": {"kind": "rule", "load": "/nowhere", "micro_batch_size": 7}},
     "reward.load reward.micro_batch_size", {"reward.kind": "model", "placement.reward": "main"}),
    ({"ref.rope_scaling_type": "linear", "ref.high_freq_factor": 3.0}, "ref.high_freq_factor",
     {f"ref.{key}": value for key, value in LLAMA3.items()}),
    ({"training.sequence_parallel": True}, "training.sequence_parallel",
     {"ref.tensor_model_parallel_size": 2}),
    ({f"{ACTOR}micro_batch_size": 2, f"{ACTOR}max_tokens_per_micro_batch": 99},
     "actor_rollout.micro_batch_size", {f"{ACTOR}max_tokens_per_micro_batch": None}),
    ({"training.max_skipped": 2}, "training.max_skipped", {"training.nan_policy": "skip"}),
    ({"logging.reference_kl": True}, "logging.reference_kl", {"algorithm.kl_ctrl.kl_coef": 0.0}),
    ({**VALIDATES, **NEVER, "data.val_files": "/val.jsonl"}, "data.val_files",
     {"validation.interval": 2}),
    ({**VALIDATES, "validation.top_k": 4, "validation.temperature": 0.5},
     "validation.temperature validation.top_k", {"validation.do_sample": True}),
    (ADAPTIVE, "algorithm.kl_ctrl.type algorithm.kl_ctrl.horizon",
     {"algorithm.kl_ctrl.kl_coef": 0.1}),
    (MODEL, "reward.rules", VALIDATES),
    ({**LOCAL, "training.max_restarts": 1, "resource_pool.env": {"A": "b"},
     "device.resource_name": "x", "runtime.address": "head:1", "runtime.start_timeout_s": 9.0},
     "training.max_restarts resource_pool.env device.resource_name runtime.address "
     "runtime.start_timeout_s", {"runtime.kind": "ray"}),
    ({**JOINED, "training.max_restarts": 0, "training.node_wait_s": 9.0}, "training.node_wait_s",
     {"training.max_restarts": 1}),
    ({"training.node_wait_s": 9.0, "device.devices_per_node": 4, "resource_pool.wait_s": 9.0,
     "resource_pool.bad_nodes": "leave_out"},
     "training.node_wait_s device.devices_per_node resource_pool.wait_s resource_pool.bad_nodes",
     JOINED),
    ({"rollout.first_rank_draws": True}, "rollout.first_rank_draws",
     {f"{ACTOR}tensor_model_parallel_size": 2}),
    ({**GRAPHS, f"{ACTOR}tensor_model_parallel_size": 2},
     "rollout.decode_graphs", {f"{ACTOR}tensor_model_parallel_size": 1}),
    ({**GRAPHS, "model.small.num_experts": 4}, "rollout.decode_graphs",
     {"model.small.num_experts": None}),
    ({**GRAPHS, "training.deterministic": True}, "rollout.decode_graphs",
     {"training.deterministic": None}),
    ({"device.devices_per_node": 4}, "device.devices_per_node", {"device.memory_gib": 64}),
    ({f"{ACTOR}do_sample": True, f"{ACTOR}top_k": 3, f"{ACTOR}min_new_tokens": 2,
     f"{ACTOR}fixed_responses": "given.jsonl"}, "actor_rollout.top_k actor_rollout.min_new_tokens",
     {f"{ACTOR}fixed_responses": None}),
]  # fmt: skip


@pytest.mark.parametrize(("changes", "noted", "mended"), CASES, ids=[c[1] for c in CASES])
def test_an_unused_key_is_noted_until_its_condition_is_met(make_tree, changes, noted, mended):
    keys = set(noted.split())
    assert keys <= unused(make_tree(changes))
    assert not keys & unused(make_tree({**changes, **mended}))


def unused(tree: dict[str, Any]) -> set[str]:
    """The keys in lines of keys without effect."""
    notes = resolve_with_notes(tree, "test")[1]
    lines = [note.partition(": no effect")[0] for note in notes if ": no effect" in note]
    return {key for line in lines for key in re.findall(r"(?:^|, )([a-z_.]+)=", line)}


def test_keys_of_a_role_that_the_run_does_not_have_are_noted(make_tree):
    shared = {"training.cliprange_value": 0.5, "model.small.critic_update_epochs": 2}
    unused = {"model.other": {"num_layers": 2}}
    tree = make_tree({**GRPO, **shared, **unused}, WITHOUT_CRITIC)
    assert resolve_with_notes(tree, "test")[1] == [
        "model.small.critic_update_epochs=2, training.cliprange_value=0.5: no role of this run "
        "reads it"
    ]
    assert resolve_with_notes(make_tree(shared), "test")[1] == []


def test_an_explicit_default_is_not_noted(make_tree):
    tree = make_tree({f"{ACTOR}temperature": 1.0, "model.small.low_freq_factor": 1.0})
    assert resolve_with_notes(tree, "test")[1] == []
