"""An interrupted and resumed run equals an uninterrupted one, bit by bit."""

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from mindspeed_rlxf.checkpoint.directory import RunDirectory
from mindspeed_rlxf.checkpoint.store import Checkpoint, RunStore
from mindspeed_rlxf.cli.convert import main as convert
from mindspeed_rlxf.config.enums import KlPenalty
from mindspeed_rlxf.config.problems import UserError
from mindspeed_rlxf.trainer.ppo import PpoTrainer
from mindspeed_rlxf.weights.state_files import role_entries
from tests.chaos.same_run import lines_of, state_of
from tests.distributed.llamas import PLAIN, make_models, same_tensors
from tests.distributed.resume_run import Killed, start
from tests.distributed.test_layout_invariance import (
    ARCHITECTURES,
    CP2,
    EP2,
    ITERATIONS,
    PP2,
    SHARDED,
    TP2,
    VP2,
)
from tests.forks import Forks

T = TypeVar("T")
Run = Callable[..., RunDirectory]
LOSSES = ("actor/pg_loss", "critic/vf_loss", "actor/grad_norm", "critic/grad_norm")


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_models(tmp_path_factory.mktemp("models"), PLAIN)


class OneDriver:
    """The warm runtime in the place of one that may have several drivers."""

    is_first = True

    def __init__(self, runtime: Any) -> None:
        self.create_pools = runtime.create_pools

    def from_first(self, make: Callable[[], T]) -> T:
        return make()


@pytest.fixture
def run(warm_runtime: Any, models: Path) -> Run:
    return partial(start, OneDriver(warm_runtime), models)


def on_local_runtime(forks: Forks, models: Path, *steps: Any) -> str:
    """Runs the steps of `resume_run` in a process of their own; returns what it printed."""
    return forks.run("tests.distributed.resume_run", models, json.dumps(steps), megatron=True)


@pytest.mark.parametrize("async_save", [False, pytest.param(True, marks=pytest.mark.long)])
def test_an_interrupted_run_is_the_uninterrupted_one_bitwise(forks, models, tmp_path, async_save):
    """Sampled generation, shuffled mini-batches and prompts, adaptive KL, decaying rates.

    Interrupted before the first checkpoint, between two, and at the end of an epoch (80 prompts,
    16 in an iteration). A bit of the newest checkpoint is flipped on the way.
    """
    iterations = ITERATIONS + 1
    keys = {"train_iters": iterations, "async_save": async_save}
    whole, cut = RunDirectory(tmp_path / "whole"), RunDirectory(tmp_path / "cut")
    newest = cut.checkpoints / "iter_0000003"
    said = on_local_runtime(
        forks,
        models,
        [str(whole.path), {"train_iters": iterations}],
        [str(cut.path), {"killed_in": 1, **keys}],
        [str(cut.path), {"killed_in": 4, **keys}],
        str(newest / "actor" / "state_00000.safetensors"),
        [str(cut.path), {"killed_in": 6, **keys}],
        [str(cut.path), keys],
    )
    wrong = "actor/state_00000.safetensors differs from what was written (sha256)"
    assert f"{newest} cannot be resumed from: {wrong}" in said
    resumed = [line.split(";")[0] for line in said.splitlines() if line.startswith("resumed")]
    assert resumed == [f"resumed from {cut.checkpoints}/iter_000000{n}" for n in (2, 5)]
    assert state_of(cut, iterations) == state_of(whole, iterations)
    metrics = lines_of(cut.metrics)
    assert [line["iteration"] for line in metrics] == list(range(1, iterations + 1))
    assert metrics == lines_of(whole.metrics)
    assert len({line["metrics"]["critic/kl_coeff"] for line in metrics}) == iterations
    samples = lines_of(cut.samples)
    assert samples == lines_of(whole.samples)
    assert [sample["sample_id"] for sample in samples] == list(range(16 * iterations))
    assert_versions_count_updates(samples)
    ledger = lines_of(cut.consumed)
    assert [line["first_sample_id"] for line in ledger] == list(range(0, 16 * iterations, 16))
    taken = [prompt for line in ledger for prompt in line["prompts"]]
    assert sorted(taken[:80]) == list(range(80)) and len(set(taken[80:])) == 16
    for role in ("actor", "critic"):
        assert_a_checkpoint_is_the_final_model(cut, iterations, role, tmp_path / role)


def resumed(run: Run, folder: Path, iterations: int, **how: Any) -> tuple[RunDirectory, Any]:
    """Kill a run in iteration 2, resume it, and compare it with an undisturbed one.

    Returns the run, and the metrics of its iterations.
    """
    whole = run(folder / "whole", keep_last=9, train_iters=iterations, **how)
    run(folder / "cut", killed_in=2, train_iters=iterations, **how)
    cut = run(folder / "cut", train_iters=iterations, **how)
    assert state_of(cut, iterations) == state_of(whole, iterations)
    lines = lines_of(cut.metrics)
    assert lines == lines_of(whole.metrics) and lines_of(cut.samples) == lines_of(whole.samples)
    return whole, [line["metrics"] for line in lines]


def test_a_run_that_goes_back_does_the_same_iterations_again(run, tmp_path):
    """With `training.resume_from`; the checkpoint that it leaves is kept with its records."""
    first = run(tmp_path, train_iters=2)
    before = state_of(first, 2), [lines_of(f) for f in (first.metrics, first.samples)]
    back = run(tmp_path, train_iters=2, resume_from=1)
    after = state_of(back, 2), [lines_of(f) for f in (back.metrics, back.samples)]
    assert after == before and len(after[1][0]) == 2
    aside = RunDirectory(back.checkpoints / "after_0000001")
    assert lines_of(aside.metrics) == before[1][0]
    assert Checkpoint(aside.path / "iter_0000002", 2).read().files
    assert [line["iteration"] for line in lines_of(back.consumed)] == [1, 2]


@pytest.mark.long
def test_a_run_resumes_in_the_warm_up_of_the_critic(run, models, tmp_path):
    """Before the actor has taken a step, its optimizer has no moments."""
    whole, metrics = resumed(run, tmp_path, 4, sections={"critic": {"warmup_iters": 2}})
    assert ["actor/pg_loss" in each for each in metrics] == [False, False, True, True]
    assert all("critic/vf_loss" in each for each in metrics)
    rates = [each.get("actor/lr") for each in metrics]  # linear decay over two iterations
    assert rates == [None, None, metrics[0]["critic/lr"], metrics[2]["critic/lr"]]
    coefficients = [each["critic/kl_coeff"] for each in metrics]  # adaptive
    assert coefficients[0] == coefficients[1] == coefficients[2] != coefficients[3]
    versions = [sample["weights_version"] for sample in lines_of(whole.samples)[::16]]
    assert versions == [[0, 0], [0, 0], [0, 0], [1, 1]], "no weights move in the warm-up"
    start = load_file(models / "lm" / "model.safetensors")
    after = tensors_of(whole, 2, "actor")
    assert all(after[f"weight/{name}"].equal(tensor) for name, tensor in start.items())


@pytest.mark.long
def test_a_run_resumes_whose_old_log_probs_are_those_of_the_update(run, tmp_path):
    """The coefficient of the KL in the loss follows what the update measures."""
    in_loss = {"kl_in": "loss", "kl_penalty": KlPenalty.LOW_VAR_KL}
    one_step = {"ppo_mini_batch_size": 16, "ppo_epochs": 1}
    sections = {"algorithm": in_loss, "actor_rollout": one_step}
    _, metrics = resumed(run, tmp_path, 3, sections=sections)
    assert len({each["critic/kl_coeff"] for each in metrics}) == 3
    assert all("rollout/log_prob_gap_max" not in each for each in metrics)


@pytest.mark.long
@pytest.mark.parametrize("layout", [{}, CP2], ids=["dp2", "cp2"])
def test_states_in_slices_go_on_bitwise_in_bf16(run, tmp_path, layout):
    """fp32 main weights and moments of the distributed optimizer, over two copies."""
    resumed(run, tmp_path, 3, ranks=2, layout={"bf16": True, **layout}, sections=SHARDED)


def assert_versions_count_updates(samples: list[dict[str, Any]]) -> None:
    """Each token comes from the weights that the iterations before its own have made."""
    before = [sample["iteration"] - 1 for sample in samples]
    assert [sample["weights_version"] for sample in samples] == [[n, n] for n in before]
    assert min(before) == 0 < max(before)


def assert_a_checkpoint_is_the_final_model(
    run: RunDirectory, iteration: int, role: str, target: Path
) -> None:
    """Converted without a flag for the architecture; what describes the model is in the index"""
    checkpoint = run.checkpoints / f"iter_{iteration:07d}"
    assert convert([str(checkpoint / role), str(target), "--to", "hf"]) == 0
    final = run.path / "final" / f"{role}_hf"
    names = {f.name for f in target.iterdir()} - {".converted.json"}  # the converter's own record
    assert names == {f.name for f in final.iterdir()} and same_tensors(target, final)
    config = json.loads((target / "config.json").read_text())
    assert config == json.loads((final / "config.json").read_text())
    listed = role_entries(checkpoint / role)
    beside = {f.name for f in final.iterdir()} - {"model.safetensors"}
    assert beside <= {entry["path"] for entry in listed}


MODEL_PARALLEL = {"ranks": 4, "layout": {**TP2, **PP2}}
SLICES = {"ranks": 2, "sections": SHARDED}
SHARED_EXPERTS = {"ranks": 2, "layout": EP2, "sections": SHARDED}
CONTEXT = {**SLICES, "layout": CP2}
STAGES = {"ranks": 2, "layout": PP2}
CHUNKS = {"ranks": 2, "layout": VP2}
CHAINS = {
    "dp2 states in slices, pp2, one process": ("untied", [SLICES, STAGES, {}]),
    "dp2 states in slices, tp2 pp2, one process": ("untied", [SLICES, MODEL_PARALLEL, {}]),
    "one process, tp2 pp2, dp4 states in slices, dp2": (
        "untied",
        [{}, MODEL_PARALLEL, {**SLICES, "ranks": 4}, {"ranks": 2}],
    ),
    "tp2 pp2, dp4, one process, tp2 pp2": (
        "untied",
        [MODEL_PARALLEL, {"ranks": 4}, {}, MODEL_PARALLEL],
    ),
    "cp2 states in slices, one process, cp2": ("untied", [CONTEXT, {}, CONTEXT]),
    "experts": ("qwen3-moe", [SHARED_EXPERTS, {}, {"ranks": 2, "layout": EP2}]),
    "tied embeddings": ("tied", [STAGES, {}, STAGES]),
    "chunks": ("tied, 4 layers", [CHUNKS, {}, CHUNKS]),
}


@pytest.mark.long
@pytest.mark.parametrize("chain", CHAINS)
def test_a_run_goes_on_in_other_layouts(warm_runtime, tmp_path, chain):
    """Each layout does one iteration, the last one the rest; with fixed responses."""
    architecture, layouts = CHAINS[chain]
    folder = make_models(tmp_path / "models", ARCHITECTURES[architecture])
    how = {"fixed": True, "train_iters": 4, "architecture": architecture}
    go, out = partial(start, OneDriver(warm_runtime), folder, **how), tmp_path / "cut"
    whole = lines_of(go(tmp_path / "whole").metrics)
    for n, layout in enumerate(layouts[:-1]):
        go(out, killed_in=n + 2, **layout)
    cut = go(out, **layouts[-1])
    configs = sorted(file.name for file in out.glob("config.*"))
    assert configs == [*(f"config.{n}.yaml" for n in range(1, len(layouts))), "config.yaml"]
    lines = lines_of(cut.metrics)
    assert_versions_count_updates(lines_of(cut.samples))
    assert [line["iteration"] for line in lines] == [line["iteration"] for line in whole]
    for ours, theirs in zip(lines, whole, strict=True):
        for name in LOSSES:
            expected = pytest.approx(theirs["metrics"][name], rel=1e-5, abs=1e-7)
            assert ours["metrics"][name] == expected, (ours["iteration"], name)
        # A difference of log-probs of about 1: rounding of fp32 is what is left.
        kl = theirs["metrics"]["critic/kl"]
        assert ours["metrics"]["critic/kl"] == pytest.approx(kl, abs=1e-6), ours["iteration"]
    taken = [prompt for line in lines_of(cut.consumed) for prompt in line["prompts"]]
    assert len(set(taken)) == len(taken) == 16 * 4


OTHERS = [{**SLICES, "ranks": 4}, {}, CONTEXT, {"ranks": 2}, MODEL_PARALLEL]


@pytest.mark.parametrize(
    ("bf16", "others"),
    [
        (False, OTHERS[:1]),
        pytest.param(False, OTHERS, marks=pytest.mark.long),
        pytest.param(True, OTHERS, marks=pytest.mark.long),
    ],
    ids=["fp32, one", "fp32", "bf16"],
)
def test_other_layouts_load_and_save_weights_and_moments_bitwise(
    run, tmp_path, monkeypatch, bf16, others
):
    """One iteration, then each layout loads it, exports its weights and saves again: bit by bit."""
    out, kept = tmp_path / "run", {"keep_last": 9, "fixed": True}

    def laid_out(keys: dict[str, Any]) -> dict[str, Any]:
        return {**keys, **kept, "layout": {**keys.get("layout", {}), "bf16": bf16}}

    directory = run(out, killed_in=2, **laid_out(MODEL_PARALLEL))
    learnt = {role: tensors_of(directory, 1, role) for role in ("actor", "critic")}
    monkeypatch.setattr(PpoTrainer, "fit", saved_again)
    for number, layout in enumerate(others, start=2):
        directory = run(out, killed_in=1, **laid_out(layout))
        for role, tensors in learnt.items():
            found = tensors_of(directory, number, role)
            assert found.keys() == tensors.keys() and any("exp_avg_sq" in name for name in found)
            assert [name for name in tensors if not found[name].equal(tensors[name])] == []
            target = tmp_path / f"{role}_{number}"
            source = directory.checkpoints / "iter_0000001" / role
            assert convert([str(source), str(target), "--to", "hf"]) == 0
            assert same_tensors(target, out / "final" / f"{role}_hf")


def saved_again(trainer: PpoTrainer) -> None:
    """In the place of training."""
    trainer.iteration += 1
    checkpoints = trainer.checkpoints
    checkpoints.write(trainer.iteration, print)
    checkpoints.commit(trainer.iteration, trainer.state_dict(), None, print)
    checkpoints.export_weights()
    raise Killed


def tensors_of(run: RunDirectory, iteration: int, role: str) -> dict[str, Tensor]:
    return whole_tensors(run.checkpoints / f"iter_{iteration:07d}" / role)


def whole_tensors(folder: Path) -> dict[str, Tensor]:
    """Weights and states of the optimizer, put together by hand from all files."""
    tensors: dict[str, Tensor] = {}
    files = map(load_file, sorted(folder.glob("state_*.safetensors")))
    for key, piece in (item for file in files for item in file.items()):
        name, _, place = key.partition("@")  # the first indices
        corner = [int(n) for n in place.split(",")]
        ends = [start + size for start, size in zip(corner, piece.shape, strict=True)]
        known = tensors.get(name, torch.empty([0] * len(ends), dtype=piece.dtype))
        shape = [max(old, new) for old, new in zip(known.shape, ends, strict=True)]
        whole = torch.full(shape, torch.nan, dtype=piece.dtype)
        whole[tuple(slice(size) for size in known.shape)] = known
        part = tuple(slice(start, end) for start, end in zip(corner, ends, strict=True))
        assert whole[part].isnan().all(), f"{name} is written twice at {corner}"
        whole[part] = piece
        tensors[name] = whole
    assert not any(tensor.isnan().any() for tensor in tensors.values())
    return tensors


def test_another_run_is_refused_and_a_finished_one_is_marked(run, tmp_path):
    directory = run(tmp_path / "run", train_iters=1)
    with pytest.raises(UserError, match=r"training\.seed: 1234 -> 5"):
        run(tmp_path / "run", train_iters=1, seed=5)
    assert RunStore(directory.checkpoints).exported() == 1
