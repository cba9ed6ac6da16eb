"""Warnings on the console beside the metrics."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

from mindspeed_rlxf.config.schema import LoggingConfig
from mindspeed_rlxf.run.directory import RunDirectory
from mindspeed_rlxf.run.recorder import Recorder


def test_skipped_steps_and_non_finite_scores_are_warned_of(tmp_path: Path, capsys: Any) -> None:
    config: Any = SimpleNamespace(logging=LoggingConfig(), training=SimpleNamespace(train_iters=9))
    recorder = Recorder(config, RunDirectory(tmp_path), None)
    recorder.warn_of_non_finite(3, {"actor/skipped_steps": 2.0, "critic/skipped_steps": 0.0}, {})
    recorder.warn_of_non_finite(4, {}, {17: float("nan")})
    recorder.close()
    printed = capsys.readouterr().out
    assert "skipped 2 optimizer steps of the actor in iteration 3" in printed
    assert "critic" not in printed
    assert "the reward returned nan for sample 17 in iteration 4" in printed
