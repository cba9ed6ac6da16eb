"""Megatron stages compute what transformers computes, in every layout, from the same files."""

from pathlib import Path
from typing import Any

import pytest
import torch

from mindspeed_rlxf.cluster.group import RoleGroup, Sharded
from mindspeed_rlxf.config.enums import Role
from mindspeed_rlxf.config.rank_layout import ParallelLayout
from mindspeed_rlxf.config.schema import ArchitectureConfig
from mindspeed_rlxf.data.batch import Prompts, RoleOutput, Rollouts
from mindspeed_rlxf.engine.train_engine import TrainEngine
from mindspeed_rlxf.models.parameters import Head
from mindspeed_rlxf.roles.actor import ActorGroup
from mindspeed_rlxf.roles.critic import CriticGroup, CriticRole
from mindspeed_rlxf.roles.rollout import Sampling
from tests.distributed.groups import build_group, build_policy, layout_of
from tests.distributed.llamas import (
    ONE_GROUP,
    PLAIN,
    QWEN2,
    QWEN3,
    SCALED,
    TIED,
    greedy_response,
    make_llama,
    make_pair,
    role_of,
    run_config,
    same_tensors,
    shares_groups,
)
from tests.distributed.probe import EngineProbe
from tests.distributed.samples import make_rollouts, sequences

TP2, PP2 = {"tensor_model_parallel_size": 2}, {"pipeline_model_parallel_size": 2}
SP, PADDED = {"sequence_parallel": True}, {"packed_sequences": False}
LAYOUTS: dict[str, dict[str, Any]] = {
    "tp1": {}, "tp1-padded": PADDED, "tp2": TP2, "tp2-sp": TP2 | SP,
    "tp2-sp-padded": TP2 | SP | PADDED, "pp2": PP2, "pp2-padded": PP2 | PADDED,
}  # fmt: skip
FAMILIES = {
    "plain": PLAIN, "tied": TIED, "scaled-rope": SCALED, "qwen2": QWEN2, "qwen3": QWEN3,
    "one-group": ONE_GROUP,
}  # fmt: skip


def three_layouts(**families: ArchitectureConfig) -> list[Any]:
    """Of each family, and one in which ranks share a key-value group."""
    cases = [
        pytest.param(layout, architecture, id=f"{name}-{layout}")
        for name, architecture in families.items()
        for layout in ("tp1", "tp2", "pp2")
    ]
    return [*cases, pytest.param("tp2", ONE_GROUP, id="one-group-tp2", marks=shares_groups)]


def world_size(layout: dict[str, Any]) -> int:
    tp = layout.get("tensor_model_parallel_size", 1)
    return int(tp * layout.get("pipeline_model_parallel_size", 1))


def expected_logits(model: Any, rollouts: Rollouts, scored: bool) -> torch.Tensor:
    """Each sample alone through transformers, at the places that predict response tokens."""
    parts = []
    for prompt, response in sequences(rollouts):
        with torch.no_grad():
            hidden = model.model(torch.cat((prompt, response))[None]).last_hidden_state
            body = hidden[0, len(prompt) - 1 : -1]
            parts.append(model.score(body).squeeze(-1) if scored else model.lm_head(body))
    return torch.cat(parts)


@pytest.mark.parametrize(
    "family", [pytest.param(n, marks=shares_groups if n == "one-group" else ()) for n in FAMILIES]
)
@pytest.mark.parametrize("scored", [False, True], ids=["logits", "scores"])
def test_forward_equals_transformers_in_every_layout(warm_runtime, tmp_path, family, scored):
    architecture = FAMILIES[family]
    model = make_llama(tmp_path, architecture, scored)
    rollouts = make_rollouts()
    expected = expected_logits(model, rollouts, scored)
    head = Head.SCORE if scored else Head.LANGUAGE_MODEL
    method = EngineProbe.scores if scored else EngineProbe.logits
    for name, layout in LAYOUTS.items():
        role = role_of(tmp_path, architecture, micro_batch_size=3, **layout)
        group = build_group(warm_runtime, layout_of(role), EngineProbe, role, head)
        got = torch.tensor(group.call(method, Sharded([rollouts])).result()[0])
        error = (got - expected).abs().max() / expected.abs().max()
        assert error < 2e-5, f"{name}: {error:.2e}"


@pytest.mark.parametrize(
    ("layout", "architecture"), three_layouts(untied=PLAIN, tied=TIED, qwen2=QWEN2, qwen3=QWEN3)
)
def test_export_gives_back_every_tensor_byte_for_byte(warm_runtime, tmp_path, layout, architecture):
    lm, scored = make_pair(tmp_path, architecture)
    size = world_size(LAYOUTS[layout])
    config = run_config(lm, scored, architecture, LAYOUTS[layout], pool=size)
    pool = warm_runtime.create_pools({"main": [size]})["main"]
    actor, critic = ActorGroup(config, pool), CriticGroup(config, pool)
    for build in (actor.build(), critic.build()):
        build.result()
    for name, role in {"lm": actor, "scored": critic}.items():
        folders = tmp_path / f"{name}_out", tmp_path / f"{name}_megatron"
        role.group.call_engine(TrainEngine.export, *folders).result()
    for source, target in ((lm, tmp_path / "lm_out"), (scored, tmp_path / "scored_out")):
        assert same_tensors(source, target) and (target / "config.json").exists()


@pytest.mark.parametrize("layout", ["tp2", "pp2"])
def test_a_rank_reads_only_its_own_shard(warm_runtime: Any, tmp_path: Path, layout: str) -> None:
    make_llama(tmp_path, PLAIN)
    role = role_of(tmp_path, PLAIN, **LAYOUTS[layout])
    # Every process leads a replica of its own as far as reports go, so that each one answers.
    group = build_group(warm_runtime, layout_of(role), EngineProbe, role, Head.LANGUAGE_MODEL)
    everyone = RoleGroup(Role.ACTOR_ROLLOUT, ParallelLayout(2, 1, 1), group.pool)
    for read, shard in everyone.call(EngineProbe.bytes_of_a_load).result():
        assert read <= shard * 1.05
        assert read >= shard * 0.9  # all of it but the padding of the vocabulary
    (imported,) = {tuple(names) for names in everyone.call(EngineProbe.trackers).result()}
    assert imported == (), "Megatron imports trackers where it finds them"


@pytest.mark.parametrize(("layout", "architecture"), three_layouts(untied=PLAIN, tied=TIED))
def test_greedy_generation_equals_transformers_token_by_token(
    warm_runtime: Any, tmp_path: Path, layout: str, architecture: ArchitectureConfig
) -> None:
    eos = [3, 8, 17, 21, 26, 30, 34]
    model = make_llama(tmp_path, architecture)
    size = world_size(LAYOUTS[layout])
    rows = {"num_samples_per_step": 3}
    config = run_config(
        tmp_path, tmp_path, architecture, LAYOUTS[layout], pool=size, actor_rollout=rows
    )
    pool = warm_runtime.create_pools({"main": [size]})["main"]
    actor, rollout = build_policy(config, pool, eos)
    prompts = make_prompts(8)
    pending = rollout.generate(prompts, seed=5, sampling=Sampling.GREEDY)
    produced = actor.sample_texts(pending.rows(), 8)
    for text, prompt in zip(produced, prompts.token_ids, strict=True):
        assert text.response_ids == greedy_response(model, prompt, eos)
    assert len({len(text.response_ids) for text in produced}) > 2, "they end at different steps"
    reports = pending.result()
    responses = sum(len(text.response_ids) for text in produced)
    assert sum(r.sampled_tokens for r in reports) == responses
    assert sum(r.decoded_tokens for r in reports) == responses - 8
    assert sum(r.prompt_tokens for r in reports) == sum(len(p) for p in prompts.token_ids)


def make_prompts(count: int) -> Prompts:
    rollouts = make_rollouts(seed=7).select(range(count))
    ids = [prompt.numpy() for prompt, _ in sequences(rollouts)]
    empty = [[]] * count, [{}] * count
    return Prompts(list(range(count)), ids, [""] * count, ["test"] * count, *empty)


def test_sampled_tokens_do_not_depend_on_batch_or_layout(warm_runtime: Any, tmp_path: Path) -> None:
    make_llama(tmp_path, TIED)
    produced = {}
    for name, layout, size, rows in (
        ("alone", {}, 1, 1),
        ("all at once", {}, 1, 8),
        ("dp2", {}, 2, 3),
        ("tp2", LAYOUTS["tp2"], 2, 5),
        ("pp2", LAYOUTS["pp2"], 2, 2),
    ):
        settings = {"do_sample": True, "top_k": 20, "top_p": 0.9, "num_samples_per_step": rows}
        config = run_config(tmp_path, tmp_path, TIED, layout, pool=size, actor_rollout=settings)
        pool = warm_runtime.create_pools({"main": [size]})["main"]
        actor, rollout = build_policy(config, pool, [3])
        rollouts = rollout.generate(make_prompts(8), seed=11).rows()
        produced[name] = [text.response_ids for text in actor.sample_texts(rollouts, 8)]
    assert all(responses == produced["alone"] for responses in produced.values())
    assert len({tuple(r) for r in produced["alone"]}) == 8


def test_values_equal_transformers_at_every_state(warm_runtime: Any, tmp_path: Path) -> None:
    """Slot t is the value before token t; the slot after the last token is at that token."""
    model = make_llama(tmp_path, PLAIN, scored=True)
    config = run_config(tmp_path, tmp_path, PLAIN, {"micro_batch_size": 3})
    layout = config.layout(Role.CRITIC)
    group = build_group(warm_runtime, layout, ValuesAsReport, config, role=Role.CRITIC)
    rollouts = make_rollouts()
    got = group.call(ValuesAsReport.report_values, Sharded([rollouts])).result()[0]
    for row, (prompt, response) in enumerate(sequences(rollouts)):
        with torch.no_grad():
            hidden = model.model(torch.cat((prompt, response))[None]).last_hidden_state[0]
            expected = model.score(hidden[len(prompt) - 1 :]).squeeze(-1)
        torch.testing.assert_close(torch.tensor(got[row][: len(expected)]), expected)
        assert not any(got[row][len(expected) :])


class ValuesAsReport(CriticRole):
    def report_values(self, rollouts: Rollouts) -> Any:
        return RoleOutput(report=self.values(rollouts).rows.values.tolist())
