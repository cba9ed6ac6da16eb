"""Adapters on models of transformers compute, learn and are merged as PEFT's own."""

from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from torch.testing import assert_close
from transformers import AutoModelForCausalLM

from mindspeed_rlxf.config.enums import Role
from mindspeed_rlxf.roles.actor import ActorRole
from mindspeed_rlxf.roles.critic import CriticRole
from tests.distributed.fsdp_program import STEPS, config_of
from tests.distributed.samples import make_experience, make_rollouts
from tests.distributed.test_fsdp import FSDP, ULYSSES, case_of, close, plain_kl, run_cases
from tests.peft_engine import PeftEngine
from tests.plain_engine import PlainEngine
from tests.unit.weights.folders_of import read_folder

LORA = {"rank": 3, "alpha": 6.0}
ATTENTION = {
    **LORA,
    "target_modules": r".*\.[qo]_proj",
    "exclude_modules": ["layers.0.self_attn.o_proj"],
}
SENT = ", sent"
SAVING = {"recompute": "full", "offload": {"weights": True, "optimizer": True}}


def peft_results(case: dict[str, Any]) -> dict[str, Any]:
    """Return what `fsdp_program` returns, by PEFT in one process."""
    config, rollouts = config_of(case, 1), make_rollouts()
    experience, steps = make_experience(rollouts), STEPS[: case.get("steps", 1)]
    actor, critic = ActorRole(config, PeftEngine), CriticRole(config, PeftEngine)
    engines: Any = {"actor": actor.engine, "critic": critic.engine}
    found = {
        "actor.outputs": engines["actor"].log_probs(rollouts, 0.8).log_probs,
        "critic.outputs": engines["critic"].values(rollouts).values,
        "scores": engines["critic"].scores(rollouts).scores,
        "reference": ActorRole(config, PlainEngine).engine.log_probs(rollouts, 0.8).log_probs,
        "actor.steps": actor.update_policy(rollouts, experience, steps).report.steps,
        "critic.steps": critic.update_critic(rollouts, experience, steps).report.steps,
    }
    found["kl"] = plain_kl(engines["actor"], PlainEngine(config, Role.REF))
    for name, engine in engines.items():
        found[f"{name}.weights"] = engine.file_tensors()
    return found


def make_cases(folder: Path, made: dict[str, tuple[str, dict[str, Any]]]) -> dict[str, Any]:
    """Return a case per name, of a family with its adapters, and one that takes no step."""
    cases = {
        name: case_of(folder / name, family, ULYSSES if "ulysses" in name else FSDP, steps=2,
                      trained={"lora": lora, **SAVING})
        for name, (family, lora) in made.items()
    }  # fmt: skip
    return cases | {f"{name}{SENT}": {**case, "steps": 0} for name, case in cases.items()}


def compare(results: dict[str, Any], cases: dict[str, Any]) -> None:
    """Compare with PEFT's adapters in one process; bitwise what is sent before any step."""
    for name, case in cases.items():
        ours, plain = results[name], peft_results(case)
        close(ours, plain, name)
        assert_close(ours["reference"], plain["reference"], rtol=1e-5, atol=1e-5)
        for role in ("actor", "critic") if name.endswith(SENT) else ():
            found, wanted = (each[f"{role}.weights"] for each in (ours, plain))
            assert all(found[n].equal(tensor) for n, tensor in wanted.items()), name


def test_adapters_are_those_of_peft_on_two_ranks(tmp_path: Path) -> None:
    """They resume bitwise, and the folders at the end are what PEFT makes of them."""
    cases = make_cases(tmp_path, {"llama": ("llama", LORA)})
    out, one = tmp_path / "out", {**cases["llama"], "steps": 1}
    more = {
        "saving": {**one, "save": str(tmp_path / "state"), "export": str(out)},
        "loading": {**one, "load": str(tmp_path / "state")},
    }
    results = run_cases(2, cases | more, tmp_path / "two")
    compare(results, cases)
    for role in ("actor", "critic"):
        assert results["loading"][f"{role}.loaded"] == ["", True]
        for name, tensor in results["saving"][f"{role}.last"].items():
            assert torch.equal(results["loading"][f"{role}.weights"][name], tensor), name
    model = AutoModelForCausalLM.from_pretrained(cases["llama"]["lm"])
    merged = PeftModel.from_pretrained(model, out / "actor_adapter").merge_and_unload()
    wanted, exported = merged.state_dict(), read_folder(out / "actor")
    assert all(wanted[name].equal(tensor) for name, tensor in exported.items())
    assert read_folder(out / "critic").keys() == exported.keys() | {"score.weight"}


@pytest.mark.long
def test_other_families_have_adapters(tmp_path: Path) -> None:
    made = {name: (name, LORA) for name in ("qwen2", "gemma2", "qwen3_5")}
    cases = make_cases(tmp_path, made | {"ulysses": ("qwen3_moe", ATTENTION)})
    compare(run_cases(2, cases, tmp_path / "two"), cases)
