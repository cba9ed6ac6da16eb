"""TensorBoard and wandb, offline: the metrics of a run can be read back from their files."""

import importlib.util
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from mindspeed_rlxf.reporting.trackers import _choose_mode, find_problems
from tests.tracker_records import check_resumed_run, wandb_records

NAMES = ["tensorboard", "wandb"]


@pytest.mark.long
def test_a_resumed_run_continues_its_records_offline(tmp_path: Path) -> None:
    """Both at once, as a run may name them. wandb's record tells nothing of the machine."""
    check_resumed_run(",".join(NAMES), tmp_path)
    records = list(wandb_records(tmp_path / "trackers" / "wandb"))
    assert {each.run.host for each in records if each.HasField("run")} == {"withheld"}
    assert not [each for each in records if each.HasField("environment")]
    assert not [file.path for each in records for file in each.files.files]


@pytest.mark.parametrize("name", NAMES)
def test_a_tracker_whose_package_is_missing_is_a_problem(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert find_problems([name]) == []
    find = importlib.util.find_spec

    def hidden(module: str, package: str | None = None) -> ModuleSpec | None:
        return None if module == name else find(module, package)

    monkeypatch.setattr(importlib.util, "find_spec", hidden)
    (problem,) = find_problems([name])
    assert problem.value == name and f"`pip install {name}`" in problem.remedy


@pytest.mark.parametrize(
    ("offline", "variables", "mode"),
    [
        (True, {"WANDB_MODE": "online", "WANDB_API_KEY": "k"}, "offline"),
        (True, {"WANDB_MODE": "disabled"}, "disabled"),
        (False, {}, "online"),
        (False, {"WANDB_MODE": "disabled"}, "disabled"),
        (None, {}, "offline"),
        (None, {"WANDB_API_KEY": "k"}, "online"),
        (None, {"WANDB_API_KEY": "k", "WANDB_MODE": "offline"}, "offline"),
    ],
)
def test_a_run_that_is_offline_stays_so(
    offline: bool | None, variables: dict[str, str], mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("WANDB_MODE", "WANDB_API_KEY"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    run: Any = SimpleNamespace(offline=offline)
    assert _choose_mode(run, "WANDB") == mode
