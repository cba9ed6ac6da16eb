"""Commands of users give the same results on a simulated NPU as on a CPU."""

import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.chaos.same_run import MACHINE_METRICS
from tests.distributed.test_bf16 import BAND
from tests.golden.runs import START
from tests.npu_sim import commands, ray_run, run
from tests.processes import ROOT, read_metrics

pytestmark = pytest.mark.long
VALIDATED = {"data.val_files": START / "prompts.jsonl", "validation.interval": 1}


@pytest.mark.parametrize(
    ("name", "changes"),
    [("gae", VALIDATED), ("gae_full_kl", {}), ("grpo", {}), ("online_dpo", {})],
)
def test_a_run_equals_that_on_cpu(
    simulated: Path, tmp_path: Path, name: str, changes: dict[str, Any]
) -> None:
    assert commands.largest_difference(name, tmp_path, changes) <= run.TOLERANCE
    lines = read_metrics(tmp_path / "sim run")
    assert len(lines) == commands.ITERATIONS + bool(changes)  # validated before the first one
    assert any(key.startswith("val") for key in lines[-1]) == bool(changes)


def test_a_stopped_run_goes_on_as_if_it_had_not_stopped(simulated: Path, tmp_path: Path) -> None:
    changes = {"training.train_iters": 5}
    assert commands.largest_difference("gae", tmp_path, changes, stopped=True) <= run.TOLERANCE
    assert len(list((tmp_path / "sim run" / "checkpoints").glob("iter_*"))) > 1


def test_bf16_stays_in_the_band_of_fp32(simulated: Path, tmp_path: Path) -> None:
    curves = []
    for kind, bf16 in (("cpu", False), ("sim", True)):
        rate = {"critic.lr": 1e-3}  # the usual one, which the band was measured with
        changes = {"training.bf16": bf16, "training.train_iters": 8, **rate}
        curves.append(read_metrics(commands.finish("gae", tmp_path, kind, changes)))
    apart = {
        key: sum(abs(a[key] - b[key]) for a, b in zip(*curves, strict=True)) / len(curves[0])
        for key in BAND
    }
    assert apart == {key: pytest.approx(0, abs=limit) for key, limit in BAND.items()}


def test_converted_weights_train_as_those_they_were_made_of(
    simulated: Path, tmp_path: Path
) -> None:
    commands.convert(START, tmp_path / "mg", tmp_path)
    runs = []
    for number, load in enumerate((START, tmp_path / "mg")):
        scratch = tmp_path / str(number)
        scratch.mkdir()
        changes = {"actor_rollout.load": load, "ref.load": load}
        runs.append(read_metrics(commands.finish("grpo", scratch, "sim", changes)))
    kept = [
        [{k: v for k, v in m.items() if not k.startswith(MACHINE_METRICS)} for m in r] for r in runs
    ]
    assert kept[0] == kept[1]


def test_a_device_without_memory_is_named(simulated: Path, tmp_path: Path) -> None:
    done = subprocess.run(
        commands.command("gae", tmp_path / "out", "sim", {}),
        cwd=ROOT, env=commands.variables("sim", tmp_path, RLXF_SIM_MEMORY_MIB="1"),
        capture_output=True, text=True, timeout=commands.TIMEOUT_S,
    )  # fmt: skip
    assert done.returncode == 1
    assert "NPU out of memory. Tried to allocate" in done.stdout + done.stderr


@pytest.mark.parametrize("name", ray_run.CASES)
def test_a_run_on_ray_with_npus_equals_that_on_cpu(simulated: Path, name: str) -> None:
    """`ray start` with NPUs, two or three of them; each worker has a device of its own."""
    assert run.rehearse_each([name], ray_run.rehearse, "/var/tmp")  # sockets: short paths
