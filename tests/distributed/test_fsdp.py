"""Training with FSDP over models of transformers equals plain torch, and Megatron's engine."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch.testing import assert_close

from mindspeed_rlxf.config.enums import Role
from mindspeed_rlxf.config.hf_config import parse_architecture, read_hf_config
from mindspeed_rlxf.roles.actor import ActorRole
from mindspeed_rlxf.roles.critic import CriticRole
from mindspeed_rlxf.weights.torch_dist import read_metadata_tensors
from tests.distributed.fsdp_models import FAMILIES, make_family, wrap
from tests.distributed.fsdp_program import STEPS, config_of
from tests.distributed.samples import make_experience, make_rollouts
from tests.plain_engine import PlainEngine
from tests.processes import ROOT, free_port, with_sources

FSDP = {"backend": "fsdp", "micro_batch_size": 2}
ULYSSES = {**FSDP, "ulysses_sequence_parallel_size": 2}
SAVING = {"recompute": "full", "offload": {"weights": True, "optimizer": True}}
SHORT = ("llama", "gemma2", "qwen3_5")  # the others are in the long tests
MEGATRONS = ("llama", "qwen2", "qwen3")
Results = dict[str, Any]


def run_ranks(ranks: int, *words: object) -> None:
    """Run the module with these words on all ranks; fail the test if one fails, end them all."""
    where = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", *map(str, words)]
    ends = []
    started = [
        subprocess.Popen(
            command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
            env=with_sources(**where, RANK=str(rank), WORLD_SIZE=str(ranks)),
        )
        for rank in range(ranks)
    ]  # fmt: skip
    try:
        ends = [each.communicate(timeout=240)[0] for each in started]
    finally:
        for each in started:
            each.kill()
            each.wait()
    for each, said in zip(started, ends, strict=True):
        assert each.returncode == 0, said[-4000:]


def run_cases(ranks: int, cases: dict[str, dict[str, Any]], folder: Path) -> dict[str, Results]:
    """Return the results of `fsdp_program` for each case."""
    folder.mkdir(exist_ok=True)
    for name, case in cases.items():
        case["out"] = str(folder / f"{name}.pt")
    file = folder / "cases.json"
    file.write_text(json.dumps([*cases.values()]))
    run_ranks(ranks, "tests.distributed.fsdp_program", file)
    return {name: torch.load(case["out"], weights_only=True) for name, case in cases.items()}


def case_of(folder: Path, name: str, keys: dict[str, Any], **more: Any) -> dict[str, Any]:
    place = folder / name
    lm, scored, architecture = make_family(place, name)
    sizes = architecture.model_dump()
    return {"lm": str(lm), "scored": str(scored), "architecture": sizes, "keys": keys, **more}


def plain_results(case: dict[str, Any]) -> Results:
    """Return what `fsdp_program` returns, by plain transformers and AdamW."""
    config, rollouts = config_of(case, 1), make_rollouts()
    experience, steps = make_experience(rollouts), STEPS[: case.get("steps", 1)]
    actor, critic = ActorRole(config, PlainEngine), CriticRole(config, PlainEngine)
    engines: Any = {"actor": actor.engine, "critic": critic.engine}
    found = {
        "actor.outputs": engines["actor"].log_probs(rollouts, 0.8).log_probs,
        "critic.outputs": engines["critic"].values(rollouts).values,
        "scores": engines["critic"].scores(rollouts).scores,
        "actor.steps": actor.update_policy(rollouts, experience, steps).report.steps,
        "critic.steps": critic.update_critic(rollouts, experience, steps).report.steps,
    }
    for name, engine in engines.items():
        found[f"{name}.weights"] = engine.file_tensors()
    if "kl" in case:
        found["kl"] = plain_kl(engines["actor"], PlainEngine(config, Role.REF))
    return found


@torch.no_grad()
def plain_kl(policy: Any, reference: Any) -> torch.Tensor:
    """Return KL(policy || reference) of the trained tokens, [rows, response]."""
    rollouts = make_rollouts()
    found = torch.zeros(rollouts.response_ids.shape)
    for row in range(rollouts.num_rows):
        trained = rollouts.trained_mask[row].nonzero().squeeze(1)
        p, q = (
            (each.model.lm_head(each._hidden(rollouts, row)[trained]) / 0.8).log_softmax(-1)
            for each in (policy, reference)
        )
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


def check_families(folder: Path, families: Any, cases: dict[str, dict[str, Any]]) -> dict:
    """Compare families with plain transformers on two ranks, data-parallel and as Ulysses group.

    Computes `cases` in the same processes; returns their results.
    """
    made = {name: case_of(folder, name, FSDP) for name in families}
    for name in {"llama", "qwen2"} & made.keys():
        made[name]["kl"] = True
    alone = ("qwen3_5", "phi3")
    ulysses = {f"{n} u": {**c, "keys": ULYSSES} for n, c in made.items() if n not in alone}
    results = run_cases(2, made | ulysses | cases, folder / "two")
    for name, case in made.items():
        plain = plain_results(case)
        for key in {name, f"{name} u"} & results.keys():
            close(results[key], plain, key)
    return results


@pytest.mark.long
def test_other_families_equal_plain_transformers_on_two_ranks(tmp_path: Path) -> None:
    # Adam makes steps of the rounding in gradients of OPT's key biases, which are 0.
    check_families(tmp_path, [name for name in FAMILIES if name not in (*SHORT, "opt")], {})


def test_families_equal_plain_transformers_and_resume_on_two_ranks(tmp_path: Path) -> None:
    """Data-parallel and in a Ulysses group; with recomputation and offload; resumed elsewhere."""
    place, out = str(tmp_path / "state"), tmp_path / "out"
    experts = case_of(tmp_path / "moe", "qwen3_moe", FSDP, trained=SAVING)
    saving = {**experts, "save": place, "export": str(out)}
    loading = {**experts, "load": place}
    leaking = case_of(tmp_path / "leaking", "qwen3_5", FSDP, broken="packs")
    noisy = case_of(tmp_path / "noisy", "opt", FSDP, broken="_remove_noise")
    narrow = {**case_of(tmp_path / "narrow", "llama", {**FSDP, "bf16": True}), "lr": 1e-6}
    narrow["save"] = str(tmp_path / "narrow state")
    wrapped = case_of(tmp_path / "wrapped", "qwen3_5", FSDP, export=str(tmp_path / "text"))
    wrapped["lm"] = str(wrap(Path(wrapped["lm"]), tmp_path / "wrapped" / "images"))
    more = {"saving": saving, "loading": loading, "leaking": leaking, "noisy": noisy}
    more |= {"narrow": narrow, "wrapped": wrapped}
    results = check_families(tmp_path, SHORT, more)
    said = results["leaking"]["error"]
    assert "Qwen3_5ForCausalLM must compute each sequence by itself" in said, said
    assert "dropout or noise" in results["noisy"]["error"]
    saved, resumed = results["saving"], results["loading"]
    close(saved, plain_results(experts), "recomputed and offloaded")
    (alone,) = run_cases(1, {"alone": loading}, tmp_path / "one").values()
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
    from transformers import AutoModelForCausalLM

    again = tmp_path / "again"
    exports = {out: saved["actor.last"], tmp_path / "text": results["wrapped"]["actor.weights"]}
    for folder, tensors in exports.items():
        AutoModelForCausalLM.from_pretrained(folder / "actor").save_pretrained(again)
        assert same(load_file(again / "model.safetensors"), tensors)
    assert read_hf_config(tmp_path / "text" / "actor")["architectures"] == ["Qwen3_5ForCausalLM"]
    check_bf16(narrow, results["narrow"], results["llama"])


def same(found: Results, wanted: Results) -> bool:
    return found.keys() == wanted.keys() and all(torch.equal(found[n], wanted[n]) for n in wanted)


def check_bf16(case: dict[str, Any], ours: Results, wide: Results) -> None:
    """Gradients are near those of fp32, and a small step moves the saved fp32 weights."""
    norms = (each["actor.steps"][0]["grad_norm"] for each in (ours, wide))
    assert next(norms) == pytest.approx(next(norms), rel=1e-2)
    stored = read_metadata_tensors(Path(case["save"]) / "actor" / "sharded", trust_files=True)
    for name, before in load_file(Path(case["lm"]) / "model.safetensors").items():
        after = ours["actor.state"][f"weight/{name}"]
        assert stored[f"weight/{name}"].dtype is after.dtype is torch.float32
        assert 1e-7 < (after - before).abs().max() < 2e-6, name


def test_three_steps_equal_those_of_megatrons_engine(tmp_path: Path) -> None:
    fsdp = {name: case_of(tmp_path, name, FSDP, steps=3) for name in MEGATRONS}
    for case in fsdp.values():  # the exact architecture, which Megatron needs
        case["architecture"] = parse_architecture(read_hf_config(Path(case["lm"])))
    megatron = {name: {**case, "keys": {"micro_batch_size": 2}} for name, case in fsdp.items()}
    theirs = run_cases(1, megatron, tmp_path / "megatron")
    for name, ours in run_cases(1, fsdp, tmp_path / "fsdp").items():
        close(ours, theirs[name], name)
