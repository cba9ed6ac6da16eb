"""Training with FSDP over models of transformers equals plain torch, and Megatron's engine."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.testing import assert_close

from mindspeed_rlxf.config.hf_config import parse_architecture, read_hf_config
from mindspeed_rlxf.roles.actor import ActorRole
from mindspeed_rlxf.roles.critic import CriticRole
from tests.distributed.fsdp_models import FAMILIES, make_family
from tests.distributed.fsdp_program import STEPS, config_of
from tests.distributed.samples import make_experience, make_rollouts
from tests.plain_engine import PlainEngine
from tests.processes import ROOT, free_port, with_sources

FSDP, PACKED = {"backend": "fsdp", "micro_batch_size": 2}, [*FAMILIES][:-1]
ULYSSES = {**FSDP, "ulysses_sequence_parallel_size": 2}


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


def run_cases(ranks: int, cases: list[dict[str, Any]], folder: Path) -> list[dict[str, Any]]:
    """Return the results of `fsdp_program` for each case."""
    for number, case in enumerate(cases):
        case["out"] = str(folder / f"{number}.pt")
    file = folder / "cases.json"
    file.write_text(json.dumps(cases))
    run_ranks(ranks, "tests.distributed.fsdp_program", file)
    return [torch.load(case["out"], weights_only=True) for case in cases]


def plain_results(case: dict[str, Any]) -> dict[str, Any]:
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
    return found


def close(ours: dict[str, Any], theirs: dict[str, Any], what: str) -> None:
    for name in ("actor.outputs", "critic.outputs", "scores"):
        assert_close(ours[name], theirs[name], rtol=1e-5, atol=1e-5, msg=lambda m: f"{what}: {m}")
    for role in ("actor", "critic"):
        for mine, others in zip(ours[f"{role}.steps"], theirs[f"{role}.steps"], strict=True):
            assert mine == pytest.approx(others, rel=1e-4, abs=1e-6), what
        weights = theirs[f"{role}.weights"]
        assert ours[f"{role}.weights"].keys() == weights.keys(), what
        for name, tensor in weights.items():
            error = (ours[f"{role}.weights"][name] - tensor).abs().max()
            assert error <= 1e-5 * max(1, tensor.abs().max()), f"{what} {name}: {error:.1e}"


def case_of(folder: Path, name: str, keys: dict[str, Any], **more: Any) -> dict[str, Any]:
    place = folder / name
    lm, scored, architecture = make_family(place, name)
    sizes = architecture.model_dump()
    return {"lm": str(lm), "scored": str(scored), "architecture": sizes, "keys": keys, **more}


def test_every_family_equals_plain_transformers_on_two_ranks(tmp_path: Path) -> None:
    """With data parallelism, and in a Ulysses group; one update, and the weights after it."""
    made = {name: case_of(tmp_path, name, FSDP) for name in FAMILIES}
    cases = [*made.values(), *(made[name] | {"keys": ULYSSES} for name in PACKED)]
    cases = [dict(case) for case in cases]
    results = run_cases(2, cases, tmp_path)
    plain = {name: plain_results(case) for name, case in made.items()}
    for name, ours in zip((*FAMILIES, *PACKED), results, strict=True):
        close(ours, plain[name], name)


def test_three_steps_equal_those_of_megatrons_engine(tmp_path: Path) -> None:
    names = ["llama", "qwen2", "qwen3"]
    fsdp = [case_of(tmp_path, name, FSDP, steps=3) for name in names]
    for case in fsdp:  # the exact architecture, which Megatron needs
        described = read_hf_config(Path(case["lm"]))
        case["architecture"] = parse_architecture(described)
    megatron = [case | {"keys": {"micro_batch_size": 2}} for case in fsdp]
    (tmp_path / "other").mkdir()
    theirs = run_cases(1, megatron, tmp_path / "other")
    for name, *both in zip(names, run_cases(1, fsdp, tmp_path), theirs, strict=True):
        close(*both, name)
