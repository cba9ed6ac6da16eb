"""`doctor --calibrate` measures this machine; a plan then predicts times from its file."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from mindspeed_rlxf.config.enums import DeviceKind
from mindspeed_rlxf.ops.planning.calibrate import Shape, calibrate, measure
from mindspeed_rlxf.ops.planning.prediction import predict
from tests.processes import ROOT, with_sources

pytestmark = pytest.mark.long

COMMAND = "from mindspeed_rlxf.cli import main; import sys; sys.exit(main(sys.argv[1:]))"
UNSEEN = (
    Shape(6, 320, 896, 5, 5, 1024, 16, 32, 64),
    Shape(4, 512, 1408, 8, 8, 2048, 16, 48, 48),
    Shape(12, 256, 704, 4, 2, 512, 16, 64, 64),
)


def test_the_command_writes_a_file_that_a_plan_reads(tmp_path: Path) -> None:
    file = tmp_path / "rates.json"
    command = [sys.executable, "-c", COMMAND, "doctor", "--calibrate", "--to", str(file)]
    done = subprocess.run(
        [*command, "--device", "cpu"], env=with_sources(), capture_output=True, text=True,
        timeout=900, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "calibration: model 4 of 4" in done.stderr
    assert done.stdout.startswith(f"written: {file} (")
    plan = [sys.executable, str(ROOT / "ray_gpt.py"), "--config-name", "ppo_trainer_tiny"]
    shown = subprocess.run(
        [*plan, "dry_run=true", "device.kind=cpu", f"plan.calibration={file}"],
        env=with_sources(), capture_output=True, text=True, timeout=300, check=False, cwd=tmp_path,
    )  # fmt: skip
    assert "based on: measured on " in shown.stdout
    assert "predicted: " in shown.stdout


def test_unseen_models_are_predicted_within_a_quarter() -> None:
    rates = calibrate(DeviceKind.CPU, 1, lambda text: None).rates(None)
    for shape in UNSEEN:
        run = measure(shape, DeviceKind.CPU, 1)
        made = predict(run.config, rates)
        assert made.iteration_s == pytest.approx(run.seconds["all"], rel=0.25), shape
