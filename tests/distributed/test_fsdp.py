"""Training with FSDP over models of transformers equals plain torch, PEFT and Megatron's engine."""

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from torch.testing import assert_close
from transformers import AutoModelForCausalLM

from mindspeed_rlxf.config.enums import Role
from mindspeed_rlxf.config.hf_config import parse_architecture, read_hf_config
from mindspeed_rlxf.config.schema import RunConfig
from mindspeed_rlxf.engine.fsdp.model import linear_of
from mindspeed_rlxf.roles.actor import ActorRole
from mindspeed_rlxf.roles.critic import CriticRole
from mindspeed_rlxf.weights.torch_dist import read_metadata_tensors
from tests.distributed.fsdp_models import FAMILIES, make_family, wrap
from tests.distributed.fsdp_program import ADAM, STEPS, config_of
from tests.distributed.samples import make_experience, make_rollouts
from tests.forks import Forks
from tests.peft_engine import PeftEngine
from tests.plain_engine import PlainEngine
from tests.unit.weights.folders_of import read_folder

FSDP = {"backend": "fsdp", "micro_batch_size": 2}
BY_TOKENS = {"backend": "fsdp", "max_tokens_per_micro_batch": 50}
BF16 = {**FSDP, "bf16": True}
ULYSSES = {**FSDP, "context_parallel_size": 2}
SAVING = {"recompute": "full", "offload": {"weights": True, "optimizer": True}}
SHORT = ("llama", "gemma2", "qwen3_5")  # the others are in the long tests
MEGATRONS = ("llama", "qwen2", "qwen3")
LORA = {"rank": 3, "alpha": 6.0}
ATTENTION = {
    **LORA,
    "target_modules": r".*\.[qo]_proj",
    "exclude_modules": ["layers.0.self_attn.o_proj"],
}
Results = dict[str, Any]


def run_cases(
    forks: Forks, folder: Path, *groups: tuple[int, dict[str, dict[str, Any]]],
    megatron: bool = False,
) -> list[Any]:  # fmt: skip
    """Return the results of `fsdp_program` by name of a case, for each number of ranks and cases.

    One group runs after another.
    """
    words, found = [], []
    for number, (ranks, cases) in enumerate(groups):
        place = folder / str(number)
        place.mkdir(parents=True)
        outs = {name: str(place / f"{name}.pt") for name in cases}
        file = place / "cases.json"
        file.write_text(json.dumps([{**case, "out": outs[n]} for n, case in cases.items()]))
        words += [str(ranks), str(file)]
        found.append(outs)
    forks.run("tests.distributed.fsdp_program", *words, megatron=megatron)
    return [{n: torch.load(out, weights_only=True) for n, out in outs.items()} for outs in found]


def case_of(folder: Path, name: str, keys: dict[str, Any], **more: Any) -> dict[str, Any]:
    place = folder / name
    lm, scored, architecture = make_family(place, name)
    sizes = architecture.model_dump()
    return {"lm": str(lm), "scored": str(scored), "architecture": sizes, "keys": keys, **more}


def plain_results(case: dict[str, Any], kind: Any = PlainEngine) -> Results:
    """Return what `fsdp_program` returns, by plain transformers and AdamW, or `PeftEngine`."""
    config, rollouts = config_of(case, 1), make_rollouts()
    experience, steps = make_experience(rollouts), STEPS[: case.get("steps", 1)]
    actor, critic = ActorRole(config, kind), CriticRole(config, kind)
    engines: Any = {"actor": actor.engine, "critic": critic.engine}
    found = {
        "actor.outputs": engines["actor"].log_probs(rollouts, 0.8).log_probs,
        "critic.outputs": engines["critic"].values(rollouts).values,
        "scores": engines["critic"].scores(rollouts).scores,
    }
    if kind is PeftEngine:
        found |= {f"{name}.sent": engine.file_tensors() for name, engine in engines.items()}
    found["actor.steps"] = actor.update_policy(rollouts, experience, steps).report.steps
    found["critic.steps"] = critic.update_critic(rollouts, experience, steps).report.steps
    for name, engine in engines.items():
        found[f"{name}.weights"] = engine.file_tensors()
    if "kl" in case or kind is PeftEngine:
        reference = PlainEngine(config, Role.REF)
        found["kl"] = plain_kl(engines["actor"], reference)
        found["reference"] = reference.log_probs(rollouts, 0.8).log_probs
    return found


@torch.no_grad()
def plain_kl(policy: Any, reference: Any) -> torch.Tensor:
    """Return KL(policy || reference) of the trained tokens, [rows, response]."""
    rollouts = make_rollouts()
    found = torch.zeros(rollouts.response_ids.shape)
    for row in range(rollouts.num_rows):
        trained = rollouts.trained_mask[row].nonzero().squeeze(1)
        p, q = (
            linear_of(each.model, False)(
                each._hidden(rollouts, row)[trained], each.model.lm_head.weight
            )
            for each in (policy, reference)
        )
        p, q = ((logits / 0.8).log_softmax(-1) for logits in (p, q))
        found[row, trained] = (p.exp() * (p - q)).sum(-1)
    return found


def close(ours: Results, theirs: Results, what: str) -> None:
    for name in {"actor.outputs", "critic.outputs", "scores", "kl"} & theirs.keys():
        assert_close(ours[name], theirs[name], rtol=1e-5, atol=1e-5, msg=lambda m: f"{what}: {m}")
    for role in ("actor", "critic"):
        for mine, others in zip(ours[f"{role}.steps"], theirs[f"{role}.steps"], strict=True):
            assert mine == pytest.approx(others, rel=1e-5, abs=1e-6), what
        weights = theirs[f"{role}.weights"]
        assert ours[f"{role}.weights"].keys() == weights.keys(), what
        for name, tensor in weights.items():
            error = (ours[f"{role}.weights"][name] - tensor).abs().max()
            assert error <= 1e-5 * max(1, tensor.abs().max()), f"{what} {name}: {error:.1e}"


def family_cases(folder: Path, families: Any) -> dict[str, Any]:
    """Return cases of families, data-parallel and as a Ulysses group."""
    made = {name: case_of(folder, name, FSDP) for name in families}
    if "qwen3_5" in made:
        made["qwen3_5"]["keys"] = BY_TOKENS
    for name in {"llama", "qwen2"} & made.keys():
        made[name]["kl"] = True
    alone = ("qwen3_5", "phi3")
    return made | {f"{n} u": {**c, "keys": ULYSSES} for n, c in made.items() if n not in alone}


def check_families(results: dict[str, Any], families: Any, cases: dict[str, Any]) -> None:
    """Compare families with plain transformers."""
    for name in families:
        plain = plain_results(cases[name])
        for key in {name, f"{name} u"} & cases.keys():
            close(results[key], plain, key)


def lora_cases(folder: Path, made: dict[str, tuple[str, dict[str, Any]]]) -> dict[str, Any]:
    """Return a case per name, of a family with its adapters."""
    return {
        name: case_of(folder / name, family, ULYSSES if "ulysses" in name else FSDP, steps=2,
                      trained={"lora": lora, **SAVING})
        for name, (family, lora) in made.items()
    }  # fmt: skip


def check_adapters(results: dict[str, Any], cases: dict[str, Any]) -> None:
    """Compare with PEFT in one process; the weights that are sent at first are equal bitwise."""
    for name, case in cases.items():
        ours, plain = results[name], plain_results(case, PeftEngine)
        close(ours, plain, name)
        assert_close(ours["reference"], plain["reference"], rtol=1e-5, atol=1e-5)
        for sent in ("actor.sent", "critic.sent"):
            assert all(ours[sent][n].equal(tensor) for n, tensor in plain[sent].items()), name


@pytest.fixture(scope="module")
def short(forks: Forks, tmp_path_factory: pytest.TempPathFactory) -> SimpleNamespace:
    """The cases of the short tests and their results; starting processes takes most of the time.

    Attributes:
        folder: With the states and exports.
        cases: By name.
        two, one: Results on two ranks, and on one.
        megatron: Results of Megatron's engine.
    """
    folder = tmp_path_factory.mktemp("fsdp")

    def make(name: str, family: str, keys: dict[str, Any] = FSDP, **more: Any) -> dict[str, Any]:
        return case_of(folder / name, family, keys, **more)

    experts = make("moe", "qwen3_moe", trained=SAVING)
    wrapped = make("wrapped", "qwen3_5", export=str(folder / "text"))
    wrapped["lm"] = str(wrap(Path(wrapped["lm"]), folder / "wrapped" / "images"))
    state = str(folder / "narrow state")
    adapters = lora_cases(folder, {"adapters": ("llama", LORA)})["adapters"]
    adapters_state = str(folder / "adapters state")
    cases = family_cases(folder, SHORT)
    cases |= {
        "saving": {**experts, "save": str(folder / "state"), "export": str(folder / "out")},
        "loading": {**experts, "load": str(folder / "state")},
        "leaking": make("leaking", "qwen3_5", refused=["packs"]),
        "noisy": make("noisy", "opt", refused=["_remove_noise"]),
        "stretched": make("stretched", "dynamic", BF16, refused=["check_rotary"]),
        "windows": make("windows", "qwen2_moe", refused=[]),
        "narrow": make("narrow", "llama", BF16, lr=1e-6, save=state),
        "wrapped": wrapped,
        "means": make("means", "llama", means=True),
        "reduced": make("reduced", "llama", steps=2, trained={"reduce_each_micro_batch": True}),
        "adapters": {**adapters, "save": adapters_state, "export": str(folder / "adapted")},
        "loading adapters": {**adapters, "steps": 1, "load": adapters_state},
    }
    three = {name: make("three", name, steps=3) for name in MEGATRONS}
    for case in three.values():  # the exact architecture, which Megatron needs
        case["architecture"] = parse_architecture(read_hf_config(Path(case["lm"])))
    megatron = {name: {**case, "keys": {"micro_batch_size": 2}} for name, case in three.items()}
    alone = {**three, "loading": cases["loading"]}
    with ThreadPoolExecutor() as pool:  # waits for the processes
        ours = pool.submit(run_cases, forks, folder / "fsdp", (2, cases), (1, alone))
        theirs = pool.submit(run_cases, forks, folder / "megatron", (1, megatron), megatron=True)
    two, one = ours.result()
    return SimpleNamespace(
        folder=folder, cases=cases, two=two, one=one, megatron=theirs.result()[0]
    )


@pytest.mark.long
def test_other_families_equal_plain_transformers_on_two_ranks(forks: Forks, tmp_path: Path) -> None:
    # Adam makes steps of the rounding in gradients of OPT's key biases, which are 0.
    others = [name for name in FAMILIES if name not in (*SHORT, "opt")]
    cases = family_cases(tmp_path, others)
    (results,) = run_cases(forks, tmp_path, (2, cases))
    check_families(results, others, cases)


def test_families_equal_plain_transformers_on_two_ranks(short: SimpleNamespace) -> None:
    check_families(short.two, SHORT, short.cases)
    close(short.two["means"], plain_results(short.cases["means"]), "means of gradients")
    check_bf16(short.cases["narrow"], short.two["narrow"])


def test_reduced_micro_batches_leave_no_whole_gradients(short: SimpleNamespace) -> None:
    """The gradients are those of plain torch; without the key a rank has those of all weights."""
    reduced, summed = short.two["reduced"], short.two["llama"]
    close(reduced, plain_results(short.cases["reduced"]), "reduced in each micro-batch")
    for role in ("actor", "critic"):
        assert len(reduced[f"{role}.unsharded"]) > 2 and set(reduced[f"{role}.unsharded"]) == {0}
        num_elements = sum(tensor.numel() for tensor in summed[f"{role}.weights"].values())
        assert summed[f"{role}.unsharded"] == [0, num_elements]


def test_padding_counts_as_tokens_of_a_micro_batch(short: SimpleNamespace) -> None:
    """Ranks have rows of 19, 12, 10 and 9 tokens, and of 10, 15, 10 and 11."""
    for role in ("actor", "critic"):
        tokens = short.two["qwen3_5"][f"{role}.tokens"]
        assert len(tokens) > 1 and max(tokens) <= BY_TOKENS["max_tokens_per_micro_batch"]


def test_models_that_leak_or_make_noise_are_refused(short: SimpleNamespace) -> None:
    said = short.two["leaking"]["error"]
    assert "Qwen3_5ForCausalLM must compute each sequence by itself" in said, said
    assert "dropout or noise" in short.two["noisy"]["error"]
    assert "a sequence changes the next one" in short.two["stretched"]["error"]
    assert "sliding_window=44" in short.two["windows"]["error"]


def test_a_state_is_resumed_on_any_number_of_ranks(short: SimpleNamespace) -> None:
    """With recomputation and offload. A probe of the weights leaves no trace."""
    saved, resumed, alone = short.two["saving"], short.two["loading"], short.one["loading"]
    assert [each["sent unchanged"] for each in (resumed, alone)] == [[], []]
    close(saved, plain_results(short.cases["saving"]), "recomputed and offloaded")
    for role in ("actor", "critic"):
        assert resumed[f"{role}.loaded"] == ["", True] and alone[f"{role}.loaded"] == ["", False]
        assert resumed[f"{role}.steps"] == saved[f"{role}.more"]
        for name, tensor in saved[f"{role}.last"].items():
            assert torch.equal(resumed[f"{role}.weights"][name], tensor), name  # bitwise
            assert_close(alone[f"{role}.weights"][name], tensor, rtol=1e-5, atol=1e-6)
        for state in (resumed[f"{role}.state"], alone[f"{role}.state"]):
            assert max(state.pop("steps")) == 1
            assert state.keys() == saved[f"{role}.state"].keys() - {"steps"}
            assert all(torch.equal(saved[f"{role}.state"][key], t) for key, t in state.items())


def test_transformers_loads_what_is_exported(short: SimpleNamespace, tmp_path: Path) -> None:
    exports = {"out": short.two["saving"]["actor.last"]}
    exports["text"] = short.two["wrapped"]["actor.weights"]
    for name, tensors in exports.items():
        folder = short.folder / name / "actor"
        AutoModelForCausalLM.from_pretrained(folder).save_pretrained(tmp_path)
        assert same(load_file(tmp_path / "model.safetensors"), tensors)
    assert read_hf_config(folder)["architectures"] == ["Qwen3_5ForCausalLM"]


def same(found: Results, wanted: Results) -> bool:
    return found.keys() == wanted.keys() and all(torch.equal(found[n], wanted[n]) for n in wanted)


class PlainBf16Engine(PlainEngine):
    """Plain transformers with weights, activations and gradients in bf16."""

    def __init__(self, config: RunConfig, role: Role) -> None:
        super().__init__(config, role)
        self.model.bfloat16()


def unclipped(gradients: Results, norm: float) -> Results:
    """Return the gradients before they were clipped, fp32; `norm` was theirs then."""
    assert norm > ADAM.clip_grad, "they were clipped"
    return {name: each.float() * norm / ADAM.clip_grad for name, each in gradients.items()}


def plain_gradients(case: dict[str, Any], kind: Any) -> Results:
    """Return the actor's gradients in the first step of a plain engine, by name."""
    config, rollouts = config_of(case, 1), make_rollouts()
    actor = ActorRole(config, kind)
    (step,) = actor.update_policy(rollouts, make_experience(rollouts), STEPS[:1]).report.steps
    gradients = {name: each.grad for name, each in actor.engine.model.named_parameters()}
    return unclipped(gradients, step["grad_norm"])


def check_bf16(case: dict[str, Any], ours: Results) -> None:
    """Gradients are as near to fp32 as those of plain bf16; a small step moves fp32 weights."""
    exact, plain = (plain_gradients(case, kind) for kind in (PlainEngine, PlainBf16Engine))
    averages = {name: ours["actor.state"][f"exp_avg/{name}"] for name in exact}
    # The averages started at 0.
    first = {name: each / (1 - ADAM.adam_beta1) for name, each in averages.items()}
    gradients = unclipped(first, ours["actor.steps"][0]["grad_norm"])
    for name, gradient in exact.items():
        rounding = (plain[name] - gradient).norm()
        # At most 2.15 times: eight models, with AVX-512 and AMX, and with AVX2 alone.
        assert (gradients[name] - gradient).norm() < 4 * rounding < gradient.norm(), name
    stored = read_metadata_tensors(Path(case["save"]) / "actor" / "sharded", trust_files=True)
    for name, before in load_file(Path(case["lm"]) / "model.safetensors").items():
        after = ours["actor.state"][f"weight/{name}"]
        assert stored[f"weight/{name}"].dtype is after.dtype is torch.float32
        assert 1e-7 < (after - before).abs().max() < 2e-6, name


def test_three_steps_equal_those_of_megatrons_engine(short: SimpleNamespace) -> None:
    for name in MEGATRONS:
        close(short.one[name], short.megatron[name], name)


def test_adapters_are_those_of_peft_on_two_ranks(short: SimpleNamespace) -> None:
    """They resume bitwise, and the folders at the end are what PEFT makes of them."""
    check_adapters(short.two, {"adapters": short.cases["adapters"]})
    saved, loaded = short.two["adapters"], short.two["loading adapters"]
    out = short.folder / "adapted"
    for role in ("actor", "critic"):
        folder = short.folder / "adapters state" / role / "sharded"
        stored = {key.partition("/")[2] for key in read_metadata_tensors(folder, trust_files=True)}
        score = {"lm_head.weight"} if role == "critic" else set()
        assert score < stored and all(".lora_" in name for name in stored - score)
        assert loaded[f"{role}.loaded"] == ["", True]
        assert loaded["sent unchanged"] == []
        for name, tensor in saved[f"{role}.last"].items():
            assert torch.equal(loaded[f"{role}.weights"][name], tensor), name
    model = AutoModelForCausalLM.from_pretrained(short.cases["adapters"]["lm"])
    merged = PeftModel.from_pretrained(model, out / "actor_adapter").merge_and_unload()
    wanted, exported = merged.state_dict(), read_folder(out / "actor")
    assert all(wanted[name].equal(tensor) for name, tensor in exported.items())
    assert read_folder(out / "critic").keys() == exported.keys() | {"score.weight"}


@pytest.mark.long
def test_other_families_have_adapters(forks: Forks, tmp_path: Path) -> None:
    made = {name: (name, LORA) for name in ("qwen2", "gemma2", "qwen3_5")}
    cases = lora_cases(tmp_path, made | {"ulysses": ("qwen3_moe", ATTENTION)})
    (results,) = run_cases(forks, tmp_path, (2, cases))
    check_adapters(results, cases)
