"""Ranks that share experts generate what one rank with all experts does."""

from dataclasses import dataclass
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.multiprocessing.reductions import StorageWeakRef

from mindspeed_rlxf.cluster.group import Sharded
from mindspeed_rlxf.cluster.interface import ColocatedRole
from mindspeed_rlxf.config.enums import Role
from mindspeed_rlxf.config.rank_layout import ParallelLayout
from mindspeed_rlxf.data.batch import Prompts, RoleOutput
from mindspeed_rlxf.engine.parallel import ParallelGroups
from mindspeed_rlxf.models import shared_experts
from mindspeed_rlxf.models.parameter_counts import shard_sizes
from mindspeed_rlxf.models.parameters import Head
from mindspeed_rlxf.roles.requests import make_requests
from mindspeed_rlxf.roles.rollout import RolloutRole, Sampling
from mindspeed_rlxf.rollout.native import NativeRollout
from mindspeed_rlxf.rollout.weights import SharedWeights
from tests.distributed.groups import build_group, build_policy
from tests.distributed.llamas import MIXTRAL, QWEN3_MOE, make_llama, run_config
from tests.distributed.test_experts import EP2
from tests.distributed.test_parity_with_transformers import PP2, TP2, make_prompts
from tests.unit.models.moe import Expert, Experts, Router, one_by_one, place_weights

GROUPED = hasattr(F, "grouped_mm")
EP4 = {"expert_model_parallel_size": 4}
SLICES = 10
EOS, SEED = [3, 8, 17, 21, 26, 30, 34], 5


@dataclass
class Seen:
    """One replica's part of a generation."""

    responses: list[tuple[list[int], list[float]]]  # tokens, log-probs; if closed those taken
    awake: int  # elements of the parameters while it generates
    asleep: int  # and afterwards
    copies: int  # storages that it freed on falling asleep, and that something keeps
    own: int  # passes with tokens of its own
    idle: int  # and those for other ranks
    grouped: list[bool]  # of each layer, whether it computed grouped GEMMs


class WatchedRollout(RolloutRole):
    def look(
        self, prompts: Prompts, taken: int | None = None, given: tuple[Any, ...] = ()
    ) -> RoleOutput:
        """Generate, or score `given` responses. taken: results until the caller has enough"""
        engine, announced = self.replica.engine, []
        assert isinstance(engine, NativeRollout)
        expert_sync, grouped = engine.source.expert_sync, list[bool]()
        announce, begin = type(expert_sync).announce, type(expert_sync).begin
        expert_sync.announce = lambda tokens: announced.append(announce(expert_sync, tokens))  # type: ignore[method-assign]

        def begin_and_look() -> None:
            begin(expert_sync)
            grouped.extend(layer.weights is not None for layer in expert_sync.layers)

        expert_sync.begin = begin_and_look  # type: ignore[method-assign]
        engine.wake()
        awake = sum(p.numel() for p in engine.model.parameters())
        storages = [StorageWeakRef(p.untyped_storage()) for p in engine.model.parameters()]
        if given:
            scores = engine.score(prompts.token_ids, given[: prompts.num_rows])
            responses = [(list(r), logs) for r, logs in zip(given, scores, strict=False)]
        else:
            results = engine.generate(
                make_requests(prompts, self.settings[Sampling.TRAINING], SEED)
            )
            found = list(results) if taken is None else [next(results) for _ in range(taken)]
            results.close()  # type: ignore[attr-defined]
            found.sort(key=lambda result: result.place)
            responses = [(result.tokens, result.log_probs) for result in found]
        engine.sleep()
        asleep = sum(p.numel() for p in engine.model.parameters())
        assert isinstance(engine.source, SharedWeights)
        trained = engine.source.engine.weights.tensors.values()
        own = {StorageWeakRef(tensor.untyped_storage()).cdata for tensor in trained}
        copies = sum(not each.expired() for each in storages if each.cdata not in own)
        idle = engine.stats().idle_passes
        return RoleOutput(
            report=Seen(responses, awake, asleep, copies, len(announced), idle, grouped)
        )

    def look_at_slices(self, prompts: Prompts) -> RoleOutput:
        """Generate in slices of 3 decode steps, with a point after every other one.

        Report: tokens and log-probs, and the passes that each slice computed or served.
        """
        engine, found, passes = self.replica.engine, dict[int, Any](), list[int]()
        expert_sync, announced = engine.source.expert_sync, []  # type: ignore[attr-defined]
        announce = type(expert_sync).announce
        expert_sync.announce = lambda tokens: announced.append(announce(expert_sync, tokens))
        engine.wake()
        engine.add(make_requests(prompts, self.settings[Sampling.TRAINING], SEED))
        for number in range(SLICES):
            announced.clear()
            found |= {result.place: result for result in engine.advance(3)}
            passes.append(len(announced) + engine.stats().idle_passes)
            if number % 2:
                engine.add(engine.withdraw())
        assert engine.withdraw() == [], "all have ended"
        engine.sleep()
        responses = [(found[n].tokens, found[n].log_probs) for n in range(prompts.num_rows)]
        return RoleOutput(report=(responses, passes))


def build(runtime: Any, folder: Path, architecture: Any, size: int, keys: Any) -> Any:
    """The group of a rollout, two rows at a time."""
    rows = {"num_samples_per_step": 2, "do_sample": True, "temperature": 1.3}
    config = run_config(folder, folder, architecture, keys, pool=size, actor_rollout=rows)
    pool = runtime.create_pools({"main": [size]})["main"]
    actor, rollout = build_policy(config, pool, EOS)
    peer = ColocatedRole(Role.ACTOR_ROLLOUT)
    rollout.group.build(WatchedRollout, config, tuple(EOS), peer, None).result()
    rollout._version = None
    rollout.update_weights(actor, 0)
    return rollout.group


def look(group: Any, prompts: Prompts, *more: Any) -> list[Seen]:
    found = group.call(WatchedRollout.look, Sharded(prompts.split(group.layout.dp)), *more)
    reports: list[Seen] = found.result()
    return reports


def assert_same(found: list[Seen], expected: list[Any]) -> None:
    assert_same_responses([response for each in found for response in each.responses], expected)


def assert_same_responses(responses: list[Any], expected: list[Any]) -> None:
    assert [tokens for tokens, _ in responses] == [tokens for tokens, _ in expected]
    for (_, logs), (_, wanted) in zip(responses, expected, strict=True):
        assert logs == pytest.approx(wanted, abs=1e-5)


@pytest.mark.parametrize(
    ("architecture", "size", "keys"),
    [
        pytest.param(QWEN3_MOE, 2, EP2, id="ep2", marks=pytest.mark.long),
        pytest.param(MIXTRAL, 4, {**TP2, **EP2, "sequence_parallel": True}, id="tp2-ep2"),
        pytest.param(QWEN3_MOE, 4, {**PP2, **EP2}, id="pp2-ep2", marks=pytest.mark.long),
        pytest.param(MIXTRAL, 4, EP4, id="ep4", marks=pytest.mark.long),
    ],
)
def test_ranks_that_share_experts_generate_what_one_rank_does(
    warm_runtime: Any, tmp_path: Path, architecture: Any, size: int, keys: Any
) -> None:
    """Sampled responses and their log-probs, replicas that take several times as many steps,
    replicas without a prompt, and given responses."""
    make_llama(tmp_path, architecture)
    one = build(warm_runtime, tmp_path, architecture, 1, {})
    several, single = make_prompts(7), make_prompts(1)
    [alone], [first] = look(one, several), look(one, single)
    assert alone.idle == 0 and len({len(tokens) for tokens, _ in alone.responses}) > 3
    shared = build(warm_runtime, tmp_path, architecture, size, keys)
    tp, ep = keys.get("tensor_model_parallel_size", 1), keys["expert_model_parallel_size"]
    share = sum(shard_sizes(architecture, Head.LANGUAGE_MODEL, tp, 0, 1, 1, ep))

    found = look(shared, several)
    assert_same(found, alone.responses)
    assert {each.awake for each in found} == {share} and {each.asleep for each in found} == {0}
    assert {each.copies for each in found} == {0}
    assert all(each.grouped == [GROUPED] * 2 for each in found)
    assert_in_step(found, ep)

    found = look(shared, single)  # all others have none
    assert_same(found, first.responses)
    assert_in_step(found, ep)
    busy = next(each for each in found if each.responses)
    assert sum(each.own > 0 for each in found) == 1
    assert {each.idle for each in found[-ep:] if each is not busy} == {busy.own}

    parts = several.split(shared.layout.dp)
    sliced = shared.call(WatchedRollout.look_at_slices, Sharded(parts)).result()
    assert_same_responses([each for responses, _ in sliced for each in responses], alone.responses)
    assert len({len(responses) for responses, _ in sliced}) == 2, "unequal work"
    for group in range(0, len(sliced), ep):
        passes = [counts for _, counts in sliced[group : group + ep]]
        assert all(counts == passes[0] for counts in passes), "they make every slice together"

    given = tuple([4 + i] * (1 + 2 * i) for i in range(5))
    [scored] = look(one, make_prompts(1), None, given)
    found = look(shared, make_prompts(1), None, given)
    assert_same(found, scored.responses)
    assert_in_step(found, ep)


def assert_in_step(found: list[Seen], ep: int) -> None:
    """Neighbours that share experts make the same number of passes, some for others."""
    for first in range(0, len(found), ep):
        group = found[first : first + ep]
        assert len({each.own + each.idle for each in group}) == 1
        assert min(each.idle for each in group) == 0


def test_a_rank_that_needs_no_more_responses_still_serves_its_experts(warm_runtime, tmp_path):
    make_llama(tmp_path, QWEN3_MOE)
    one = build(warm_runtime, tmp_path, QWEN3_MOE, 1, {})
    prompts = make_prompts(8)
    [alone] = look(one, prompts)
    shared = build(warm_runtime, tmp_path, QWEN3_MOE, 2, EP2)
    found = look(shared, prompts, Sharded([None, 1]))
    assert_same(found[:1], alone.responses[:4])
    [(tokens, _)] = found[1].responses
    assert tokens in [wanted for wanted, _ in alone.responses[4:]]
    assert found[1].own + found[1].idle == found[0].own and found[1].idle > 0


EXPERTS, HIDDEN, TOPK = 8, 16, 3


class ExchangeProbe:
    """A layer over all ranks of the world, with uneven numbers of tokens."""

    def __init__(self) -> None:
        self.groups = ParallelGroups(1, 1, seed=1, ep=dist.get_world_size())

    @torch.no_grad()
    def error(
        self, width: int, dtype: torch.dtype, counts: tuple[int, ...], chunk: int, is_reversed: bool
    ) -> RoleOutput:
        """Largest relative error from one expert after the other in fp32, and whether grouped.

        counts: tokens of each rank; chunk: of all ranks that are exchanged at once
        """
        torch.manual_seed(7)
        experts = [Expert(HIDDEN, width, dtype) for _ in range(EXPERTS)]
        weights = [[p.detach().float() for p in expert.parameters()] for expert in experts]
        rank, share = self.groups.ep.rank(), EXPERTS // self.groups.ep.size()
        own = slice(rank * share, (rank + 1) * share)
        local = Experts(experts[own])
        place_weights(local, "reversed buffer" if is_reversed else "stack")
        exchange = shared_experts.Exchange(self.groups.ep, self.groups.tp, counts)
        router = Router(HIDDEN, EXPERTS, TOPK, EXPERTS - 1)
        layer = shared_experts.SharedExperts(
            SimpleNamespace(router=router, experts=local), exchange
        )
        layer.bind()
        tokens = [torch.randn(count, HIDDEN).to(dtype) for count in counts][rank]
        usual, shared_experts.EXCHANGE_TOKENS = shared_experts.EXCHANGE_TOKENS, chunk
        out, _ = layer(tokens[:, None])
        shared_experts.EXCHANGE_TOKENS = usual
        assert out.dtype is dtype and out.shape == (counts[rank], 1, HIDDEN)
        shares = router(tokens)[0] if len(tokens) else []
        largest = 0.0
        for row, token, each in zip(out[:, 0], tokens, shares, strict=True):
            expected = one_by_one(token, each, weights)
            error = (expected - row).abs().max() / expected.abs().max()
            largest = max(largest, float(error))
        return RoleOutput(report=(largest, layer.weights is not None))


@pytest.mark.parametrize(
    ("width", "dtype", "grouped"),
    # rows of 12 elements in bf16 begin at no multiple of 16 bytes
    [(12, torch.float32, True), (8, torch.bfloat16, True), (12, torch.bfloat16, False)],
)
@pytest.mark.parametrize("size", [pytest.param(2, marks=pytest.mark.long), 4])
def test_an_exchange_computes_what_one_expert_after_the_other_does(
    warm_runtime: Any, size: int, width: int, dtype: torch.dtype, grouped: bool
) -> None:
    group = build_group(warm_runtime, ParallelLayout(size, 1), ExchangeProbe)
    for first, chunk, is_reversed in product(((5, 5), (0, 7), (9, 1)), (4096, 6), (False, True)):
        counts = first if size == 2 else (*first, 3, 0)
        case = width, dtype, counts, chunk, is_reversed
        for error, was_grouped in group.call(ExchangeProbe.error, *case).result():
            assert error < (1e-5 if dtype is torch.float32 else 3e-2), case
            assert was_grouped == (grouped and GROUPED)
