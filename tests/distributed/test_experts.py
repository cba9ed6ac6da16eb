"""Mixtures of experts compute what transformers computes, on whatever ranks the experts are."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from megatron.core.transformer.moe.router import TopKRouter

from mindspeed_rlxf.config.rank_layout import ParallelLayout
from mindspeed_rlxf.config.schema import OptimizerConfig, RoleConfig
from mindspeed_rlxf.data.batch import RoleOutput, Rollouts
from mindspeed_rlxf.engine.engine import MegatronEngine
from mindspeed_rlxf.engine.micro_batch import chunk_rows
from mindspeed_rlxf.engine.train_engine import TrainEngine
from mindspeed_rlxf.models.parameters import Head
from mindspeed_rlxf.roles.rollout import Sampling
from tests.distributed.groups import build_group, build_policy, layout_of, split_evenly
from tests.distributed.llamas import (
    MIXTRAL,
    QWEN3_MOE,
    QWEN3_MOE_UNNORMED,
    greedy_response,
    make_llama,
    role_of,
    run_config,
    same_tensors,
)
from tests.distributed.probe import EngineProbe, likelihood_step
from tests.distributed.samples import make_rollouts, sequences
from tests.distributed.test_parity_with_transformers import (
    PADDED,
    PP2,
    SP,
    TP2,
    expected_logits,
    make_prompts,
)
from tests.unit.weights.folders_of import read_folder

FAMILIES = {"qwen3-moe": QWEN3_MOE, "unnormed": QWEN3_MOE_UNNORMED, "mixtral": MIXTRAL}
EP2 = {"expert_model_parallel_size": 2}
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "ep1": (1, {}), "ep1-padded": (1, PADDED), "ep2": (2, EP2), "ep2-padded": (2, EP2 | PADDED),
    "tp2": (2, TP2), "tp2-sp": (2, TP2 | SP), "tp2-ep2-sp": (4, TP2 | EP2 | SP),
    "pp2-ep2": (4, EP2 | PP2),
}  # fmt: skip
VIRTUAL = {"virtual-pp2-ep2": (4, {**EP2, **PP2, "num_layers_per_virtual_pipeline_stage": 1})}
CONTEXT = {"cp2-ep2": (2, {"context_parallel_size": 2, **EP2})}  # its first rank reports
LONG = pytest.mark.long


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(
    "scored", [False, pytest.param(True, marks=LONG)], ids=["logits", "scores"]
)
def test_forward_equals_transformers_wherever_the_experts_are(
    warm_runtime: Any, tmp_path: Path, family: str, scored: bool
) -> None:
    """The replicas that share experts have micro-batches of different lengths."""
    model = make_llama(tmp_path, FAMILIES[family], scored)
    rollouts = make_rollouts()
    expected = expected_logits(model, rollouts, scored)
    head = Head.SCORE if scored else Head.LANGUAGE_MODEL
    method = EngineProbe.scores if scored else EngineProbe.logits
    for name, (size, keys) in LAYOUTS.items():
        role = role_of(tmp_path, FAMILIES[family], micro_batch_size=3, **keys)
        layout = layout_of(role, size)
        group = build_group(warm_runtime, layout, EngineProbe, role, head)
        reports = group.call(method, split_evenly(rollouts, layout.dp)).result()
        flat = [number for part in reports for number in part]
        error = (torch.tensor(flat) - expected).abs().max() / expected.abs().max()
        assert error < 2e-5, f"{name}: {error:.2e}"
        if family == "qwen3-moe":
            group.call(EngineProbe.stream, tmp_path / name, size - 1).result()
            assert same_tensors(tmp_path / name, tmp_path), name


@pytest.mark.parametrize(
    ("family", "layout"),
    [
        ("mixtral", "ep2"),
        ("qwen3-moe", "tp2-ep2-sp"),
        pytest.param("mixtral", "tp2-ep2-sp", marks=LONG),
        pytest.param("mixtral", "pp2-ep2", marks=LONG),
        pytest.param("qwen3-moe", "ep2", marks=LONG),
        pytest.param("qwen3-moe", "pp2-ep2", marks=LONG),
        pytest.param("qwen3-moe", "virtual-pp2-ep2", marks=LONG),
    ],
)
def test_experts_are_exported_once_each_and_generate_as_in_transformers(
    warm_runtime: Any, tmp_path: Path, family: str, layout: str
) -> None:
    """Replicas generate different numbers of steps: none waits for another's experts."""
    architecture = FAMILIES[family].model_copy(update={"num_layers": 4})
    lm, eos = tmp_path / "lm", [3, 8, 17, 21, 26, 30, 34]
    model = make_llama(lm, architecture)
    size, keys = (LAYOUTS | VIRTUAL)[layout]
    rows = {"num_samples_per_step": 2}
    config = run_config(lm, lm, architecture, keys, pool=size, actor_rollout=rows)
    pool = warm_runtime.create_pools({"main": [size]})["main"]
    actor, rollout = build_policy(config, pool, eos)
    actor.group.call_engine(TrainEngine.export, tmp_path / "out", tmp_path / "megatron").result()
    assert same_tensors(lm, tmp_path / "out")
    reloaded = type(model).from_pretrained(tmp_path / "out").state_dict()  # by its index too
    assert all(torch.equal(t, reloaded[name]) for name, t in model.state_dict().items())
    prompts = make_prompts(8)
    produced = actor.sample_texts(
        rollout.generate(prompts, seed=5, sampling=Sampling.GREEDY).rows(), 8
    )
    for text, prompt in zip(produced, prompts.token_ids, strict=True):
        assert text.response_ids == greedy_response(model, prompt, eos)
    assert len({len(text.response_ids) for text in produced}) > 2


class RoutingProbe(EngineProbe):
    """What the routers of a bf16 model made of their hidden states."""

    def errors(self, rollouts: Rollouts) -> RoleOutput:
        """Of each router: dtype of its output, tokens whose probabilities are not those of fp32."""
        found: list[tuple[str, int]] = []

        def compare(router: Any, inputs: tuple[torch.Tensor, ...], output: Any) -> None:
            logits = inputs[0].flatten(0, -2).float() @ router.weight.float().T
            values, chosen = logits.topk(router.topk)
            expected = torch.zeros_like(logits).scatter(1, chosen, values.softmax(-1))
            off = ~torch.isclose(output[0].float(), expected, rtol=1e-5, atol=0).all(-1)
            found.append((str(output[0].dtype), int(off.sum())))

        routers = [m for m in self.engine.module.modules() if isinstance(m, TopKRouter)]
        handles = [router.register_forward_hook(compare) for router in routers]
        assert self.engine.dtype is torch.bfloat16 and len(routers) == 2
        self.logits(rollouts)
        for handle in handles:
            handle.remove()
        return RoleOutput(report=found)


def test_routing_of_a_bf16_model_is_computed_in_fp32(warm_runtime: Any, tmp_path: Path) -> None:
    make_llama(tmp_path, QWEN3_MOE)
    role = role_of(tmp_path, QWEN3_MOE, micro_batch_size=8, bf16=True)
    layout = ParallelLayout(1, 1)
    group = build_group(warm_runtime, layout, RoutingProbe, role, Head.LANGUAGE_MODEL)
    (found,) = group.call(RoutingProbe.errors, make_rollouts()).result()
    assert found == [("torch.float32", 0)] * 2


ROWS = 4  # of a micro-batch; both have an even number of tokens, which TP 2 need not fill up


class GradientProbe:
    """Gradients of one step, by the names that a Hugging Face folder gives the weights."""

    def __init__(self, role: RoleConfig) -> None:
        self.engine = MegatronEngine(role, Head.LANGUAGE_MODEL, 1, OptimizerConfig(clip_grad=0.0))

    def gradients(self, rollouts: Rollouts, main: float) -> RoleOutput:
        """Of `main` times the mean negative log-likelihood, and of the load-balancing loss."""
        batches = self.engine.micro_batches(rollouts, range(rollouts.num_rows))
        norm = self.engine.train_step(batches, likelihood_step(rollouts, main))
        weights = self.engine.weights
        for tensor in weights.tensors.values():
            tensor.data = tensor.main_grad  # type: ignore[attr-defined]
        named: dict[str, Any] = {}
        for parameter in weights.table:
            named |= weights.gather(parameter)
        by_rank: list[Any] = [None] * self.engine.groups.ep.size()
        dist.all_gather_object(by_rank, named, group=self.engine.groups.ep)
        named = {name: gradient for gradients in by_rank for name, gradient in gradients.items()}
        return RoleOutput(report=({k: v.tolist() for k, v in named.items()}, norm["grad_norm"]))


def expected_gradients(
    model: Any, rollouts: Rollouts, main: float, coefficient: float, folder: Path
) -> dict[str, torch.Tensor]:
    """transformers' forward pass, and plain sums over its tokens, experts and layers."""
    a, total = model.config, int(rollouts.response_lengths.sum())
    named, loss = a.to_dict(), torch.zeros(())
    experts = named.get("num_experts") or named["num_local_experts"]  # by the version's names
    samples = list(sequences(rollouts))
    for group in chunk_rows(range(rollouts.num_rows), ROWS):
        routed: list[list[Any]] = [[] for _ in range(a.num_hidden_layers)]
        for row in group:
            prompt, response = samples[row]
            out = model(torch.cat((prompt, response))[None], output_router_logits=True)
            log_probs = out.logits[0, len(prompt) - 1 : -1].log_softmax(-1)
            loss = loss - main * log_probs[range(len(response)), response].sum() / total
            for layer, logits in enumerate(out.router_logits):
                routed[layer] += logits.view(-1, experts).softmax(-1).unbind()
        weight = float(rollouts.response_lengths[list(group)].sum()) / total
        for tokens in routed:
            choices = [t.topk(a.num_experts_per_tok).indices.tolist() for t in tokens]
            for expert in range(experts):
                share = sum(c.count(expert) for c in choices) / sum(map(len, choices))
                probability = sum(t[expert] for t in tokens) / len(tokens)
                balance = experts * share * probability
                loss = loss + weight * coefficient * balance
    loss.backward()
    for parameter in model.parameters():
        parameter.data = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
    model.save_pretrained(folder)  # the names of a published folder
    return read_folder(folder)


@pytest.mark.parametrize(
    ("family", "main", "coefficient"),
    [
        ("qwen3-moe", 0.0, 0.7),
        ("mixtral", 1.0, 0.7),
        pytest.param("qwen3-moe", 1.0, 0.0, marks=LONG),
        pytest.param("qwen3-moe", 1.0, 0.7, marks=LONG),
        pytest.param("mixtral", 1.0, 0.0, marks=LONG),
        pytest.param("mixtral", 0.0, 0.7, marks=LONG),
    ],
)
def test_gradients_of_both_losses_equal_transformers(
    warm_runtime: Any, tmp_path: Path, family: str, main: float, coefficient: float
) -> None:
    architecture = FAMILIES[family]
    balanced = architecture.model_copy(update={"moe_aux_loss_coeff": coefficient})
    made = make_rollouts()  # without token 0, to which transformers gives no gradient
    ids = {"prompt_ids": made.prompt_ids.clamp(1), "response_ids": made.response_ids.clamp(1)}
    rollouts = replace(made, **ids)
    model = make_llama(tmp_path / "lm", architecture)
    expected = expected_gradients(model, rollouts, main, coefficient, tmp_path / "expected")
    whole = sum(float(g.square().sum()) for g in expected.values()) ** 0.5
    routers = [gradient for name, gradient in expected.items() if name.endswith(".gate.weight")]
    assert len(routers) == 2 and all(gradient.norm() > 1e-3 for gradient in routers)
    for name in ("ep1", "ep2", "tp2-sp", "tp2-ep2-sp", "cp2-ep2"):
        size, keys = (LAYOUTS | CONTEXT)[name]
        role = role_of(tmp_path / "lm", balanced, micro_batch_size=ROWS, **keys)
        layout = layout_of(role, size)
        group = build_group(warm_runtime, layout, GradientProbe, role)
        shares = split_evenly(rollouts, layout.dp)
        reports = group.call(GradientProbe.gradients, shares, main).result()
        found = {k: torch.tensor(v) for named, _ in reports for k, v in named.items()}
        assert found.keys() == expected.keys()
        for tensor, gradient in expected.items():
            error = (found[tensor] - gradient).norm() / max(float(gradient.norm()), 1e-3 * whole)
            assert error < 1e-4, f"{name}, {tensor}: {error:.2e}"
        assert reports[0][1] == pytest.approx(whole, rel=1e-5), name
