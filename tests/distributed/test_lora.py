"""Adapters compute, learn and are merged as PEFT's, in every layout."""

from functools import partial
from typing import Any

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from torch import Tensor
from torch.testing import assert_close
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from mindspeed_rlxf.cli.convert import main as convert
from mindspeed_rlxf.cluster.group import Sharded
from mindspeed_rlxf.config.enums import Role
from mindspeed_rlxf.config.schema import OptimizerConfig
from mindspeed_rlxf.roles.actor import ActorRole
from mindspeed_rlxf.roles.critic import CriticRole
from tests.distributed.groups import build_group, update
from tests.distributed.llamas import (
    PLAIN,
    QWEN2,
    QWEN3,
    QWEN3_MOE,
    TIED,
    make_models,
    make_pair,
    run_config,
    same_tensors,
    with_fsdp,
)
from tests.distributed.lora_roles import Actor, Critic
from tests.distributed.resume_run import start
from tests.distributed.samples import make_experience, make_rollouts
from tests.distributed.test_layout_invariance import (
    CP2,
    EP2,
    PP2,
    SP2,
    TP2,
    VP2,
    Outcome,
    compare,
    fixed_run,
)
from tests.distributed.test_resume import OneDriver, resumed
from tests.peft_engine import PeftEngine
from tests.plain_engine import PlainEngine
from tests.training import run
from tests.unit.weights.folders_of import read_folder

EPSILON = 1e4  # makes Adam's step nearly linear, see test_layouts.py
ALL = {"rank": 3, "alpha": 12.0}
SOME = {
    **ALL,
    "target_modules": ["q_proj", "v_proj", "up_proj"],
    "exclude_modules": r".*\.1\.mlp.*",
}
TP_PP = "tp2 pp2, sequence parallel"
LAYOUTS: dict[str, tuple[int, dict[str, Any], bool]] = {
    "one process": (1, {}, False),
    "recompute full": (1, {"recompute": "full"}, False),
    "recompute selective": (1, {"recompute": "selective"}, False),
    "dp2, distributed optimizer": (2, {}, True),
    "tp2": (2, TP2, False),
    "tp2, sequence parallel": (2, SP2, True),
    "pp2": (2, PP2, False),
    "cp2, distributed optimizer": (2, CP2, True),
    "virtual pipeline": (2, VP2, False),
    "ep2": (2, EP2, True),
    TP_PP: (4, {**SP2, **PP2}, True),
}
EXPERTS = ["recompute full", "dp2, distributed optimizer", "tp2, sequence parallel", "ep2"]
NO_EXPERTS = {**ALL, "target_modules": ["q_proj", "k_proj", "v_proj", "o_proj"]}
DENSE = [name for name in LAYOUTS if name not in ("virtual pipeline", "ep2")]
SMALL = {"rank": 3, "alpha": 3.0}
FOUR = PLAIN.model_copy(update={"num_layers": 4})
SHORT = ["recompute full", "tp2, sequence parallel", "pp2"]


def tensors(report: dict[str, Any]) -> dict[str, Tensor]:
    return {name: torch.tensor(values) for name, values in report.items()}


def difference(after: dict[str, Tensor], before: dict[str, Tensor]) -> Tensor:
    assert after.keys() == before.keys()
    return torch.cat([(before[name] - after[name]).flatten() for name in sorted(before)])


@pytest.mark.parametrize(
    ("architecture", "kind", "lora", "layouts"),
    [
        pytest.param(PLAIN, Actor, ALL, SHORT, id="actor"),
        pytest.param(PLAIN, Actor, ALL, DENSE, id="actor everywhere", marks=pytest.mark.long),
        pytest.param(QWEN2, Critic, SOME, ["tp2", "pp2"], id="critic"),
        pytest.param(TIED, Actor, SOME, DENSE, id="tied", marks=pytest.mark.long),
        pytest.param(
            FOUR,
            Critic,
            SMALL,
            ["one process", "virtual pipeline"],
            id="four",
            marks=pytest.mark.long,
        ),
        pytest.param(QWEN3_MOE, Actor, NO_EXPERTS, EXPERTS, id="experts", marks=pytest.mark.long),
    ],
)
def test_gradients_are_those_of_peft(warm_runtime, tmp_path, architecture, kind, lora, layouts):
    folders = make_pair(tmp_path, architecture)
    rollouts, experience = make_rollouts(), make_experience(make_rollouts())
    role = Role.ACTOR_ROLLOUT if kind is Actor else Role.CRITIC
    learns = ActorRole.update_policy if kind is Actor else CriticRole.update_critic

    def config_of(size: int, keys: dict[str, Any], distributed: bool) -> Any:
        optimizer = OptimizerConfig(
            lr=EPSILON, adam_eps=EPSILON, clip_grad=0.0, use_distributed_optimizer=distributed
        )
        keys = {"micro_batch_size": 2, **keys}
        learning = {k: keys.pop(k) for k in [*keys] if k == "recompute"} | {"lora": lora}
        section = {"actor_rollout" if kind is Actor else "critic": learning}
        return run_config(*folders, architecture, keys, size, optimizer, **section)

    plain: Any = (ActorRole if kind is Actor else CriticRole)(config_of(1, {}, False), PeftEngine)
    before = plain.engine.trained()
    steps = [list(range(8))]
    report = getattr(plain, learns.__name__)(rollouts, experience, steps).report
    wanted = difference(plain.engine.trained(), before)
    for name in layouts:
        config = config_of(*LAYOUTS[name])
        group = build_group(warm_runtime, config.layout(role), kind, config, role=role)
        ours = tensors(group.call(kind.trained).result()[0])
        assert_close(ours, before, rtol=0, atol=0)
        norm = update(group, learns, rollouts, experience).steps[0]["grad_norm"]
        found = difference(tensors(group.call(kind.trained).result()[0]), ours)
        error = (found - wanted).norm() / wanted.norm()
        assert error < 1e-5, f"{name}: {error:.2e}"
        assert norm == pytest.approx(report.steps[0]["grad_norm"], rel=1e-5), name


@pytest.mark.long
def test_the_reference_stays_what_was_loaded(warm_runtime, tmp_path):
    """Also where the KL of the whole vocabulary is compared."""
    rollouts, (size, keys, distributed) = make_rollouts(), LAYOUTS[TP_PP]
    optimizer = OptimizerConfig(lr=0.01, use_distributed_optimizer=distributed)
    keys = keys, size, optimizer
    config = run_config(*make_pair(tmp_path, TIED), TIED, *keys, actor_rollout={"lora": ALL})
    group = build_group(warm_runtime, config.layout(Role.ACTOR_ROLLOUT), Actor, config)
    update(group, ActorRole.update_policy, rollouts, make_experience(rollouts))
    found = group.call(Actor.loaded, Sharded([rollouts])).result()
    plain = ActorRole(config, PlainEngine).engine.log_probs(rollouts, 1.0).log_probs
    for each in map(torch.tensor, next(report for report in found if report)):
        assert_close(each, plain, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("tp", [1, 2])
def test_no_product_with_a_frozen_weight_goes_token_by_token(warm_runtime, tmp_path, tp):
    """In a forward pass: the product with A, and with tp 2 that with the loaded weight too."""
    keys = {"micro_batch_size": 2, "tensor_model_parallel_size": tp}, tp, OptimizerConfig()
    config = run_config(*make_pair(tmp_path, TIED), TIED, *keys, actor_rollout={"lora": ALL})
    group = build_group(warm_runtime, config.layout(Role.ACTOR_ROLLOUT), Actor, config)
    found = group.call(Actor.batched_products, Sharded([make_rollouts()])).result()
    assert set(found) == {0}


@pytest.mark.parametrize(
    "name",
    [
        "tp2, sequence parallel",
        "bf16",
    ],
)
def test_exported_weights_are_those_of_merge_and_unload_bitwise(warm_runtime, tmp_path, name):
    """Generation gets the loaded weights, and adapters beside them."""
    folders = make_pair(tmp_path, TIED)
    size, keys, _ = LAYOUTS.get(name, (1, {"bf16": True}, False))
    config = run_config(*folders, TIED, keys, size, actor_rollout={"lora": SOME})
    group = build_group(warm_runtime, config.layout(Role.ACTOR_ROLLOUT), Actor, config)
    peft = PeftEngine(config, Role.ACTOR_ROLLOUT).peft
    dtype = torch.bfloat16 if name == "bf16" else torch.float32
    wanted = dict(peft.to(dtype).merge_and_unload().named_parameters())
    loaded = {n: tensor.to(dtype).float() for n, tensor in read_folder(folders[0]).items()}
    for report in group.call(Actor.merged).result():
        merged = tensors(report)
        assert merged.keys() == wanted.keys()
        assert all(wanted[n].detach().float().equal(tensor) for n, tensor in merged.items())
        assert sum(not loaded[n].equal(tensor) for n, tensor in merged.items()) == 5
    trained = tensors(group.call(Actor.trained).result()[0])
    for report in group.call(Actor.sent).result():
        sent = tensors(report)
        assert sent.keys() == loaded.keys() | trained.keys()
        assert all((loaded | trained)[n].equal(tensor) for n, tensor in sent.items())


@pytest.mark.long
@pytest.mark.parametrize("layout", [(1, SP2), (2, {})], ids=["tp2", "fsdp"])
def test_layout_and_engine_change_no_run(warm_runtime, tmp_path, layout):
    """Iterations on fixed responses; adapters start alike, by their names."""
    models = make_models(tmp_path / "models", PLAIN)
    sections = {name: {"lora": ALL} for name in ("actor_rollout", "critic")}
    sections["optimizer"] = {"lr": 0.01}
    outcomes = []
    for name, (size, keys) in {"one": (1, {}), "other": layout}.items():
        ranks = 2 if keys else 1
        config, prepared = fixed_run(models, tmp_path / name, PLAIN, ranks, keys, sections)
        if size == 2:
            config = with_fsdp(config, [Role.ACTOR_ROLLOUT, Role.REF], size)
        outcomes.append(Outcome(run(config, warm_runtime, prepared)))
    compare(*outcomes, models)


@pytest.mark.parametrize(
    "layout",
    [(1, {}), pytest.param((4, {**SP2, **PP2}), marks=pytest.mark.long)],
    ids=["one process", "tp2 pp2"],
)
def test_a_run_with_adapters(warm_runtime, tmp_path, layout):
    """The reference is the model that was loaded, generation has the adapters, a resumed run
    is the same bitwise, and the folders at the end are what PEFT makes of them."""
    models = make_models(tmp_path / "models", QWEN3)
    size, keys = layout
    begin = partial(start, OneDriver(warm_runtime), models)
    sections = {name: {"lora": ALL} for name in ("actor_rollout", "critic")}
    sections["optimizer"] = {"lr": 0.02}
    how = {"architecture": "qwen3", "ranks": size, "layout": keys, "sections": sections}
    whole, metrics = resumed(begin, tmp_path, 3, **how)
    drift = [each["critic/kl"] for each in metrics]
    assert drift[0] == pytest.approx(0, abs=1e-5) and drift[1] > 1e-3 and drift[2] > 1e-3
    assert max(each["rollout/log_prob_gap_max"] for each in metrics) < 1e-4
    saved = load_file(whole.checkpoints / "iter_0000003" / "actor" / "state_00000.safetensors")
    assert all(name.split("/")[0] in ("weight", "exp_avg", "exp_avg_sq") for name in saved)
    assert all(".lora_" in name for name in saved)

    final = whole.path / "final"
    for name, kind in (
        ("actor", AutoModelForCausalLM), ("critic", AutoModelForSequenceClassification),
    ):  # fmt: skip
        folder = models / {"actor": "lm", "critic": "value"}[name]
        base = kind.from_pretrained(folder, num_labels=1, dtype=torch.float32)
        merged = PeftModel.from_pretrained(base, final / f"{name}_adapter").merge_and_unload()
        wanted, exported = merged.state_dict(), read_folder(final / f"{name}_hf")
        assert exported.keys() == wanted.keys()
        assert all(wanted[n].equal(tensor) for n, tensor in exported.items())
        mine = str(final / f"{name}_megatron"), str(tmp_path / name)
        assert convert([*mine, "--to", "hf"]) == 0
        assert same_tensors(tmp_path / name, final / f"{name}_hf")
