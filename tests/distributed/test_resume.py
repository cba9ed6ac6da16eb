"""A run that was interrupted and started again is the run that was not, bit by bit."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from mindspeed_rlxf.checkpoint.run_store import Checkpoint
from mindspeed_rlxf.config.schema import RunConfig
from mindspeed_rlxf.reporting.run_dir import RunDirectory
from mindspeed_rlxf.trainer.ppo import PpoTrainer
from mindspeed_rlxf.trainer.preflight import Prepared
from mindspeed_rlxf.trainer.run import train
from tests.distributed.llamas import PLAIN, TIED, make_llama
from tests.distributed.test_layout_invariance import ITERATIONS, fixed_run
from tests.trl.record import make_tokenizer

TIMES = ("timing/", "throughput/")


class Killed(Exception):
    """Stands for what ends a run in the middle."""


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    make_tokenizer().save_pretrained(folder / "tokenizer")
    make_llama(folder / "lm", PLAIN)
    for seed, part in enumerate(("value", "reward"), start=1):
        make_llama(folder / part, PLAIN, scored=True, seed=seed)
    return folder


Run = Callable[..., RunDirectory]


@pytest.fixture
def run(warm_runtime: Any, models: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Run]:
    """Starts, or starts again, the run in a folder; `killed_in` ends it inside that iteration."""

    def start(
        out: Path, killed_in: int | None = None, ranks: int = 1, layout: Any = None,
        fixed: bool = False, sections: Any = None, **training: Any,
    ) -> RunDirectory:  # fmt: skip
        sections = {**(sections or {})}
        sections["training"] = {"save_interval": 1, **training}
        config, prepared = fixed_run(models, out, PLAIN, ranks, layout or {}, sections)
        if not fixed:
            prepared.fixed_responses = None
        directory = RunDirectory.create(config)
        finish = PpoTrainer._finish

        def killed(trainer: PpoTrainer, *arguments: Any) -> None:
            if trainer.iteration == killed_in:
                raise Killed
            finish(trainer, *arguments)

        with monkeypatch.context() as patch:
            patch.setattr(PpoTrainer, "_finish", killed)
            if killed_in is None:
                train(config, prepared, directory, warm_runtime)
            else:
                with pytest.raises(Killed):
                    train(config, prepared, directory, warm_runtime)
        directory.unlock()
        return directory

    yield start


def state_of(directory: RunDirectory, iteration: int) -> dict[str, str]:
    """Hash of every file of actor and critic in a checkpoint: weights, slots, random streams."""
    files = Checkpoint(directory.checkpoints / f"iter_{iteration:07d}", iteration).read().files
    return {
        entry["path"]: entry["sha256"]
        for entry in files
        if not entry["path"].startswith("trainer") and not entry["path"].endswith(".metadata")
    }


def lines_of(file: Path) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
    for line in lines:
        line.pop("time_s", None)
        if "metrics" in line:
            line["metrics"] = {
                k: v for k, v in line["metrics"].items() if not k.startswith(TIMES)
            }
    return lines


def test_an_interrupted_run_is_the_uninterrupted_one_bitwise(run: Run, tmp_path: Path) -> None:
    """Sampled generation, shuffled mini-batches and prompts, adaptive KL, decaying rates."""
    whole = run(tmp_path / "whole")
    run(tmp_path / "cut", killed_in=3)
    cut = run(tmp_path / "cut")
    assert state_of(cut, ITERATIONS) == state_of(whole, ITERATIONS)
    metrics = lines_of(cut.metrics)
    assert [line["iteration"] for line in metrics] == list(range(1, ITERATIONS + 1))
    assert metrics == lines_of(whole.metrics)
    assert len({line["metrics"]["critic/kl_coeff"] for line in metrics}) == ITERATIONS
    assert lines_of(cut.samples) == lines_of(whole.samples)
