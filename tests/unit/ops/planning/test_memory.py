"""How roles and phases of a pool add up."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from mindspeed_rlxf import device
from mindspeed_rlxf.config import generation_memory
from mindspeed_rlxf.config.enums import Role
from mindspeed_rlxf.config.host_rules import GIB
from mindspeed_rlxf.config.load import resolve
from mindspeed_rlxf.config.schema import RunConfig
from mindspeed_rlxf.models.parameter_counts import model_elements
from mindspeed_rlxf.models.parameters import Head
from mindspeed_rlxf.ops.planning import memory
from mindspeed_rlxf.ops.planning.memory import cache_rows, pool_memories, pool_memory, role_memory
from mindspeed_rlxf.ops.planning.stage_memory import layer_bytes
from mindspeed_rlxf.rollout.kv_cache import CacheShape, KvCache

EXPERTS = {"model.small.num_experts": 8, "model.small.moe_ffn_hidden_size": 32}
EP4 = {**EXPERTS, "training.expert_model_parallel_size": 4}
PP2 = {"actor_rollout.pipeline_model_parallel_size": 2}


@pytest.fixture
def config(make_tree: Callable[..., Any]) -> Callable[..., RunConfig]:
    """One sample in each pass, unless the changes say otherwise."""
    one_sample = {"training.micro_batch_size": 1}
    return lambda changes=None: resolve(make_tree({**one_sample, **(changes or {})}), "test")


def phase(config: RunConfig, role: Role, name: str, stage: int = 0) -> Any:
    return next(p for p in role_memory(config, role, stage).phases if p.name == name)


def test_cache_is_as_large_as_the_real_one(config):
    run = config({"actor_rollout.num_samples_per_step": 3, "actor_rollout.bf16": True})
    # 4 layers, 4 groups of width 64 / 8 = 8; 8 + 16 tokens
    real = KvCache(CacheShape(4, 4, 8, torch.bfloat16), 24, torch.device("cpu"))
    real.fit(3, 24)
    assert phase(run, Role.ACTOR_ROLLOUT, "generate").kv_cache == sum(
        x.nbytes for x in (*real.keys, *real.values)
    )


@pytest.mark.parametrize("room", [1, 5, 1000])
def test_rows_follow_the_rule_of_the_rollout(config, monkeypatch, room):
    # A row counts with half a response, in pages: more than the 24 tokens that it can have.
    one = generation_memory.kv_cache_bytes(24, config().actor_rollout.architecture, 1, 4)
    whole = int(room * one / generation_memory.CACHE_SHARE) + 10
    monkeypatch.setattr(device, "host_memory", lambda: 8 * GIB)
    shared = config({"device.cpu_threads": 1})
    run = config({"device.memory_gib": whole / GIB})  # counts for each process, as it does in a run
    monkeypatch.setattr(device, "host_memory", lambda: 8 * whole)  # 8 processes
    assert cache_rows(run) == cache_rows(shared) == min(96 // 8, room)
    assert phase(run, Role.ACTOR_ROLLOUT, "generate").kv_cache == min(12, room) * one


def test_the_rows_of_a_server_are_its_requests(config):
    served = {"rollout.engine": "vllm"}
    assert cache_rows(config(served)) == 12  # of 256 on CPU, as no more wait
    assert cache_rows(config({**served, "rollout.vllm.max_num_seqs": 5})) == 5


@pytest.mark.parametrize(
    ("rows", "known"),
    # of a prompt of 8 and a response of 16; rows that are not given may wait and enter once more
    [({"actor_rollout.num_samples_per_step": 12}, 8), ({"device.memory_gib": 8}, 24)],
)
def test_a_prefill_holds_what_a_row_has_when_it_enters(config, rows, known):
    run = config(rows)
    assert cache_rows(run) == 12
    layer = layer_bytes(run.actor_rollout.architecture, 12 * known, 1, False, 4).kept
    expected = layer + 12 * 17 * (8 + 4 + 4)
    assert phase(run, Role.ACTOR_ROLLOUT, "generate").activations == expected


@pytest.mark.parametrize(
    ("changes", "per_logit"),
    [
        ({"actor_rollout.do_sample": False}, 12),
        ({}, 28),
        ({"actor_rollout.top_p": 0.9}, 36),
        ({"actor_rollout.do_sample": False, "actor_rollout.top_p": 0.9}, 12),
        ({"validation.do_sample": True, "validation.top_p": 0.9}, 28),  # without prompts
    ],
)
def test_sampling_sorts_where_a_top_p_is_used(config, changes, per_logit):
    large = {"actor_rollout.num_samples_per_step": 12, "model.small.vocab_size": 100_000}
    large |= {"actor_rollout.do_sample": True}
    run = config({**large, **changes})
    expected = 12 * 100_000 * per_logit + 12 * 17 * (8 + 4 + 4)
    assert phase(run, Role.ACTOR_ROLLOUT, "generate").activations == expected


def test_graphs_keep_what_sampling_needs(config):
    rows = {"actor_rollout.num_samples_per_step": 12, "actor_rollout.do_sample": True}
    rows |= {"device.kind": "cuda", "runtime.address": "head:6379"}
    plain, graphs = (
        phase(config({**rows, "rollout.decode_graphs": on}), Role.ACTOR_ROLLOUT, "generate")
        for on in (False, True)
    )
    vocab_size = config().actor_rollout.architecture.vocab_size  # 28 bytes per logit
    assert graphs.activations == plain.activations + 12 * vocab_size * 28


def test_what_is_offloaded_counts_in_the_phases_that_use_it(config):
    """Peaks of all modes: kept by all roles, and the largest phase with what it brings back."""
    actor, ref, critic = pool_memory(config(), "main").roles
    states = [sum(role.state) for role in (actor, ref, critic)]
    weights = [role.state.weights for role in (actor, ref, critic)]
    for changes in ({}, {"optimizer": True}, {"weights": True, "optimizer": True}):
        keys = {f"training.offload.{name}": value for name, value in changes.items()}
        pool = pool_memory(config(keys), "main")
        found = []
        for number, role in enumerate((actor, ref, critic)):
            for each in role.phases:
                learns = each.name in ("update", "optimizer step")
                kept = weights if len(changes) < 2 else [0, 0, 0]
                kept = [*(states if not changes else kept)]
                kept[number] = states[number] if learns or not changes else weights[number]
                found.append(sum(kept) + each.total)
        assert pool.total == max(found) + sum(role.other for role in (actor, ref, critic))
        both, optimizers = sum(weights), actor.state.optimizer + critic.state.optimizer
        copies = sum(role.copies for role in pool.roles)
        assert copies == [0, optimizers, optimizers + both][len(changes)]


def test_a_kl_over_the_vocabulary_needs_the_policy_beside_the_reference(config):
    changes = {"algorithm.kl_penalty": "full", "training.offload.weights": True}
    pool = pool_memory(config(changes), "main")
    actor, ref, _ = pool.roles
    assert pool.on_device(ref, ref.phases[0])[0] == actor.state.weights + ref.state.weights
    assert pool.on_device(actor, actor.phases[0])[0] == actor.state.weights


def test_pipeline_receives_weights_for_generation(config):
    assert phase(config(), Role.ACTOR_ROLLOUT, "generate").other == 0
    received = phase(config(PP2), Role.ACTOR_ROLLOUT, "generate").other
    layers = role_memory(config(), Role.ACTOR_ROLLOUT, 0).state.weights
    assert received == layers - role_memory(config(PP2), Role.ACTOR_ROLLOUT, 0).state.weights


def test_first_stage_holds_two_micro_batches(config):
    # tokens 24; half of 4 layers twice, and hidden states in and out: 2 x 24 x 64 x 4 each time
    run = config(PP2)
    layer = layer_bytes(run.actor_rollout.architecture, 24, 1, False, 4).kept
    expected = 2 * (2 * layer + 2 * 24 * 64 * 4)
    assert phase(run, Role.ACTOR_ROLLOUT, "update").activations == expected


def test_a_micro_batch_takes_the_limit_of_tokens(config):
    # 12 samples of 24 tokens at most: 50 tokens, or all 288 of them
    a = config().critic.architecture
    for limit, tokens in ((50, 50), (1000, 12 * 24)):
        run = config({"critic.max_tokens_per_micro_batch": limit})
        # values are read at 16 + 1 slots of each sample
        read = min(limit, 12 * 17)
        layer = layer_bytes(a, tokens, 1, False, 4).forward
        head = 64 * (tokens * (4 + 4 + 4) + read * 4) + read * 64 * 4
        assert phase(run, Role.CRITIC, "forward").activations == max(layer, head)


@pytest.mark.parametrize("backend", ["megatron", "fsdp"])
def test_the_tokens_of_a_context_parallel_rank_may_all_be_of_responses(config, backend):
    """Responses are at the end of their rows, here 16 of 24 tokens; each of two ranks has 12."""
    run = config({
        "model.small.vocab_size": 4096, "actor_rollout.context_parallel_size": 2,
        "ref.context_parallel_size": 2, "training.backend": backend,
        "actor_rollout.micro_batch_size": 1,
    })  # fmt: skip
    head = 64 * (12 * (4 + 4 + 4) + 12 * 4) + 4 * 12 * 4096
    assert phase(run, Role.ACTOR_ROLLOUT, "forward").activations == head


@pytest.mark.parametrize("backend", ["megatron", "fsdp"])
def test_an_update_has_more_arrays_of_logits_than_a_forward_pass(config, backend):
    """Here 16 tokens of a response, 4096 logits of each, and a model so small that they count."""
    keys = {"model.small.vocab_size": 4096, "training.backend": backend}
    keys["actor_rollout.micro_batch_size"] = 1

    def logits(more: dict[str, Any], role: Role, name: str) -> float:
        """Bytes per logit, some of which are of hidden states."""
        run = config({**keys, **more})
        return phase(run, role, name).activations / (16 * 4096)

    plain, trained = ({"actor_rollout.entropy_coeff": coefficient} for coefficient in (0, 0.01))
    full = {"algorithm.kl_penalty": "full"}
    actor = Role.ACTOR_ROLLOUT
    assert round(logits({}, actor, "forward")) == 4
    assert round(logits({}, Role.REF, "forward")) == 4
    assert round(logits(full, Role.REF, "forward")) == 4 * 4
    assert logits(plain, actor, "update") > 4 * 2
    of_entropy = logits(trained, actor, "update") - logits(plain, actor, "update")
    assert of_entropy == pytest.approx(4 * 2)


def test_a_gradient_reduced_early_needs_a_sum_of_the_heads_beside_it(config):
    """On the last of two stages, in bf16, where responses of 16 tokens fill more than one chunk."""
    keys = {**PP2, "resource_pool.main": 2, "training.global_batch_size": 384}
    for samples, bf16, sums in ((64, True, 0), (96, True, 4 * 32 * 64), (96, False, 0)):
        sizes = dict.fromkeys(("ppo_mini_batch_size", "micro_batch_size"), samples)
        more = {f"actor_rollout.{key}": value for key, value in (*sizes.items(), ("bf16", bf16))}
        early = config({**keys, **more, "actor_rollout.overlap_grad_reduce": True})
        late = config({**keys, **more})
        for stage, added in ((0, 0), (1, sums)):
            one, other = (phase(run, Role.ACTOR_ROLLOUT, "update", stage) for run in (early, late))
            assert one.other - other.other == added
            assert one.activations == other.activations


def expert_bytes(config: RunConfig, share: int) -> int:
    """4 layers of 8 experts with three matrices of 64 x 32, fp32."""
    assert config.critic.architecture.num_experts == 8
    return 4 * 8 // share * 3 * 64 * 32 * 4


def test_expert_ranks_hold_their_share_in_training_and_generation(config):
    whole, shared = config(EXPERTS), config(EP4)
    saved = expert_bytes(whole, 1) - expert_bytes(whole, 4)
    for role in (Role.ACTOR_ROLLOUT, Role.REF, Role.CRITIC):
        one, four = (role_memory(run, role, 0).state for run in (whole, shared))
        assert one.weights - four.weights == saved
        assert one.optimizer - four.optimizer == (2 * saved if one.optimizer else 0)
    assert phase(whole, Role.ACTOR_ROLLOUT, "generate").other == 0
    assert phase(shared, Role.ACTOR_ROLLOUT, "generate").other == 0
    all_received, received = (
        phase(config({**keys, **PP2}), Role.ACTOR_ROLLOUT, "generate").other
        for keys in (EXPERTS, EP4)
    )
    assert all_received - received == saved // 2  # of the other stage's layers


def test_an_experts_optimizer_is_shared_by_the_ranks_that_hold_it(config):
    """DP 8: eight ranks share the dense state, two each expert's."""
    run = config({**EP4, "critic.use_distributed_optimizer": True})
    experts = expert_bytes(run, 4)
    critic = role_memory(run, Role.CRITIC, 0)
    dense = critic.state.weights - experts  # every expert matrix fills whole blocks of 64
    assert critic.state.optimizer == 2 * (dense // 8 + experts // 2)


def test_each_chosen_expert_keeps_its_tokens(config):
    a = config(EXPERTS).critic.architecture
    dense = a.model_copy(update={"num_experts": None})
    many = a.model_copy(update={"moe_router_topk": 4})
    one, two, four = (layer_bytes(x, 10, 1, False, 4).kept for x in (dense, a, many))
    # 10 tokens; a choice keeps a hidden state of 64, six times 32, and 12 bytes of routing
    choice = 10 * (4 * (64 + 6 * 32) + 12)
    assert four - two == 2 * choice
    assert two - one == 2 * choice + 10 * 5 * 8 - 10 * 5 * 4 * 96  # a router, no MLP of 96


def test_without_sequence_parallel_each_rank_sends_every_token(config):
    a = config(EXPERTS).critic.architecture
    # three copies of two choices of 10 tokens, 64 wide, in bf16
    assert layer_bytes(a, 10, 4, True, 2).sent == 3 * 20 * 64 * 2
    assert layer_bytes(a, 10, 4, False, 2).sent == 3 * 80 * 64 * 2


SPLIT_POOL = {
    "resource_pool.actor": 8,
    "placement.actor_rollout": "actor",
    "actor_rollout.num_gpus_for_train": 6,
    "actor_rollout.num_gpus_for_infer": 2,
    "actor_rollout.pipeline_model_parallel_size": 2,
    "rollout.tensor_model_parallel_size": 2,
}
ONE_TP = {"rollout.tensor_model_parallel_size": 1}


def test_parts_of_a_split_pool_hold_only_their_own_memory(config):
    """Training has no cache and no other weights; generation half of them all and no optimizer."""
    run, whole = config(SPLIT_POOL), role_memory(config(), Role.ACTOR_ROLLOUT, 0)
    trains, generates = pool_memories(run)[-2:]
    [learning], [rollout] = trains.roles, generates.roles
    assert learning.state.optimizer > 0
    assert [p.name for p in learning.phases] == [
        "forward", "update", "optimizer step", "send weights",
    ]  # fmt: skip
    assert all(p.kv_cache == 0 for p in learning.phases)
    assert (rollout.state.gradients, rollout.state.optimizer) == (0, 0)
    norms = 9 * 64 * 4  # on both ranks: two of each of four layers, and the last
    assert rollout.state.weights == (whole.state.weights - norms) // 2 + norms
    shared, all_experts = (
        pool_memories(config(SPLIT_POOL | ONE_TP | EXPERTS | keys))[-1]
        for keys in ({"rollout.expert_model_parallel_size": 2}, {})
    )
    saved = all_experts.roles[0].state.weights - shared.roles[0].state.weights
    assert saved == expert_bytes(config(EXPERTS), 2)
    [receive, generate] = rollout.phases
    assert (receive.name, receive.total) == ("receive weights", whole.state.weights)
    # all 96 samples on one replica, 4 layers, 2 of 4 groups of width 8, 24 tokens, keys and values
    assert generate.kv_cache == 96 * 4 * 2 * 8 * 24 * 2 * 4
    assert (trains.rank, trains.processes) == (0, (6,))
    assert (generates.rank, generates.processes) == (6, (2,))


@pytest.mark.parametrize(
    ("limit", "together", "width", "choice"),
    # a result of 64 in bf16 and fp32; or of a width of 64 three parts in bf16 and one in fp32
    [(4096, 4 * 96, 32, 64 * 6), (40, 40, 64, 64 * 10), (2, 4, 32, 64 * 6)],
)
def test_a_prefill_exchanges_a_limited_number_of_tokens_with_the_ranks_that_share_experts(
    config, monkeypatch, limit, together, width, choice
):
    monkeypatch.setattr(generation_memory, "EXCHANGE_TOKENS", limit)
    keys = {"actor_rollout.num_samples_per_step": 12, "actor_rollout.bf16": True}
    run = config({**EP4, **keys, "model.small.moe_ffn_hidden_size": width})
    a = run.actor_rollout.architecture
    dense = layer_bytes(a, 96, 1, False, 2).kept  # 12 prompts of 8
    dense -= layer_bytes(a, 96, 1, False, 2).mlp
    # results, 8 probabilities and choices, two numbers of 4 and 12 bytes of a choice
    own = 96 * (64 * 2 + 5 * 8 + 20 * 2)
    # tokens in bf16, results in fp32; two choices with five numbers of 8 bytes
    shared = together * (64 * 6 + 2 * (40 + choice))
    expected = dense + own + shared + 12 * 17 * (8 + 4 + 4)
    assert phase(run, Role.ACTOR_ROLLOUT, "generate").activations == expected


def test_a_vllm_server_has_its_weights_and_cache(config):
    keys = {"rollout.engine": "vllm", "rollout.vllm.kv_cache_gib": 0.5}
    plain, served = (pool_memory(config(more), "main") for more in ({}, keys))
    role = served.roles[-1]
    weights = model_elements(config().actor_rollout.architecture, Head.LANGUAGE_MODEL) * 4
    assert (role.role, role.other) == (Role.ROLLOUT, weights + GIB // 2)  # on CPU for good
    assert "generate" not in {p.name for p in served.roles[0].phases}
    assert "generate" in {p.name for p in plain.roles[0].phases}


def test_a_vllm_server_on_a_device_takes_its_share_from_training_that_can_leave(
    config, monkeypatch
):
    monkeypatch.setattr(memory, "on_cpu", lambda _: False)
    keys = {
        "rollout.engine": "vllm", "rollout.vllm.gpu_memory_utilization": 0.75,
        "device.memory_gib": 8, "actor_rollout.offload.weights": True,
    }  # fmt: skip
    pool = pool_memory(config(keys), "main")
    server, phase = pool.roles[-1], pool.roles[-1].phases[0]
    assert phase.total == 6 * GIB and server.other == 0
    assert pool.on_device(server, phase).weights == sum(
        role.state.weights for role in pool.roles[1:]
    )


def test_experts_that_no_grouped_gemm_computes_keep_their_gated_activations(config):
    """On an NPU, or alone on their rank; dense layers keep the same everywhere."""
    joined = {"training.recompute": "elementwise", "runtime.address": "head:6379"}

    def activations(kind: str, **keys: Any) -> int:
        run = config({**joined, **keys, "device.kind": kind})
        return phase(run, Role.CRITIC, "update").activations

    assert activations("npu", **EXPERTS) > activations("cuda", **EXPERTS)
    assert activations("npu") == activations("cuda")
    alone = {**EXPERTS, "training.expert_model_parallel_size": 8}
    assert activations("npu", **alone) == activations("cuda", **alone)
