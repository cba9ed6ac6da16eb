"""Host memory and disk of small runs, by hand."""

from collections.abc import Callable
from typing import Any

import torch
from safetensors.torch import save_file

from mindspeed_rlxf.config.host_rules import PROCESS_BYTES
from mindspeed_rlxf.config.load import resolve
from mindspeed_rlxf.models.parameter_counts import model_elements
from mindspeed_rlxf.models.parameters import Head
from mindspeed_rlxf.ops.planning.host_memory import HostMemory, disk_needed, host_memory_needed
from mindspeed_rlxf.ops.planning.memory import pool_memory
from tests.unit.config.conftest import GRPO, WITHOUT_CRITIC

JOINED = {"resource_pool.main": [4, 4], "runtime.address": "head:6379"}
PP4 = {"actor_rollout.pipeline_model_parallel_size": 4}


def needed(make_tree: Callable[..., Any], changes: dict[str, Any]) -> HostMemory:
    config = resolve(make_tree(changes), "t")
    return host_memory_needed(config, [pool_memory(config, "main")])


def part(host: HostMemory, name: str) -> int:
    """Sum the parts whose name ends with `name`."""
    return sum(each.bytes for each in host.consumers if each.name.endswith(name))


def test_own_cluster_has_every_process_on_this_host(make_tree):
    host = needed(make_tree, {})
    assert part(host, "processes (8)") == 8 * PROCESS_BYTES
    assert part(host, "iteration before") == 2 * 96 * (8 * 8 + 50 * 16 + 42)
    assert part(host, "driver") == PROCESS_BYTES + 8 * 96 * 8


def test_responses_that_are_not_learnt_from_are_held_too(make_tree):
    def rows(changes: dict[str, Any]) -> int:
        config = resolve(make_tree({**GRPO, **changes}, WITHOUT_CRITIC), "t")
        return part(host_memory_needed(config, [pool_memory(config, "main")]), "before")

    plain = rows({})
    drawn = {"algorithm.filter_groups": True, "algorithm.max_num_gen_batches": 3}
    assert rows(drawn) == 3 * plain
    assert rows({"algorithm.adv_estimator": "remax"}) * 4 == 5 * plain


def test_batches_ahead_of_training_are_held_too(make_tree):
    """Of 96 samples, with 8 prompt and 16 response tokens each."""
    assert part(needed(make_tree, {}), "ahead") == 0
    held = part(needed(make_tree, {"rollout.max_staleness": 3}), "responses of 3 batches ahead")
    assert held == 3 * 96 * (8 * 8 + 76 * 16)
    tp2 = {"rollout.max_staleness": 3, "actor_rollout.tensor_model_parallel_size": 2}
    assert part(needed(make_tree, tp2), "ahead") == 2 * held


def test_copies_of_offloaded_parts_and_of_a_checkpoint_are_on_the_host(make_tree):
    """fp32: weights 4 bytes, moments 8; every one of 8 ranks has a whole model."""
    config = resolve(make_tree({}), "t")
    actor = model_elements(config.actor_rollout.architecture, Head.LANGUAGE_MODEL)
    critic = model_elements(config.value_model.architecture, Head.SCORE)
    host = needed(make_tree, {})
    assert (part(host, "offloads"), part(host, "checkpoint while it is written")) == (
        0,
        12 * (actor + critic),
    )
    moved = needed(make_tree, {"training.offload": {"weights": True, "optimizer": True}})
    assert part(moved, "offloads") == 8 * (4 * (2 * actor + critic) + 8 * (actor + critic))
    held = "the roles hold"
    rest = moved.total - part(moved, "offloads") - part(moved, held)
    assert rest == host.total - part(host, held)
    written = part(needed(make_tree, JOINED), "checkpoint while it is written")
    assert written == 6 * (actor + critic)


def test_stages_are_written_where_their_first_ranks_are(make_tree):
    """PP 4 x DP 2: stages start at ranks 0, 2, 4, 6, two on each host of four."""
    config = resolve(make_tree(PP4), "t")
    actor = model_elements(config.actor_rollout.architecture, Head.LANGUAGE_MODEL) * 4
    critic = model_elements(config.critic.architecture, Head.SCORE) * 4
    final = "final weights while they are written"
    assert part(needed(make_tree, PP4), final) == actor + critic
    assert part(needed(make_tree, {**PP4, **JOINED}), final) == actor // 2 + critic


def test_on_an_accelerator_roles_take_no_host_memory(make_tree):
    assert part(needed(make_tree, JOINED), "the roles hold") > 0
    assert part(needed(make_tree, {**JOINED, "device.kind": "cuda"}), "the roles hold") == 0


def test_servers_keep_weights_on_the_host(make_tree):
    """8 ranks: one copy of the fp32 weights for a server, which on devices sleeps beside them."""
    config, kept = resolve(make_tree({}), "t"), "weights for vLLM servers"
    actor = model_elements(config.actor_rollout.architecture, Head.LANGUAGE_MODEL) * 4
    served = {"rollout.engine": "vllm"}
    assert part(needed(make_tree, {}), kept) == 0
    assert part(needed(make_tree, served), kept) == 8 * actor
    tp2 = {**served, "rollout.vllm.tensor_parallel_size": 2}
    assert part(needed(make_tree, {**tp2, **JOINED, "device.kind": "cuda"}), kept) == 2 * actor
    infers = {"actor_rollout.num_gpus_for_train": 6, "actor_rollout.num_gpus_for_infer": 2}
    apart = {"placement.ref": "other", "placement.critic": "other", "resource_pool.other": 1}
    apart |= {**served, **JOINED, **infers}
    assert part(needed(make_tree, apart), kept) == 2 * actor
    assert part(needed(make_tree, {**apart, "device.kind": "cuda"}), kept) == 0  # never sleeps


def test_exports_keep_the_precision_of_their_source(make_tree, tmp_path):
    save_file({"model.norm.weight": torch.ones(1).bfloat16()}, tmp_path / "model.safetensors")
    config = resolve(make_tree({"actor_rollout.load": str(tmp_path)}), "t")
    numbers = model_elements(config.actor_rollout.architecture, Head.LANGUAGE_MODEL)
    assert disk_needed(config)["final weights of actor_rollout"] == numbers * (2 + 4)
