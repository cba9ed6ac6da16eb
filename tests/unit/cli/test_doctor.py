"""The doctor command: exit codes, the report for programs, what of a configuration is looked at."""

import json
from pathlib import Path

import pytest

from mindspeed_rlxf import cli
from mindspeed_rlxf.cli import doctor
from mindspeed_rlxf.config.enums import DeviceKind
from mindspeed_rlxf.device.findings import Finding, error, ok
from mindspeed_rlxf.ops.doctor.checks import Subject


@pytest.fixture
def subjects(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[Subject]:
    """What is looked at, in place of looking; one ordinary finding is the answer."""
    seen: list[Subject] = []

    def look(subject: Subject) -> list[Finding]:
        seen.append(subject)
        return [ok("a.b", "1")]

    monkeypatch.setattr(doctor, "check_host", look)
    monkeypatch.chdir(tmp_path)
    return seen


def test_a_sound_host_is_0_and_an_error_is_1(subjects, monkeypatch, capsys):
    assert cli.main(["doctor"]) == 0
    assert "ok       a.b  1" in capsys.readouterr().out
    monkeypatch.setattr(doctor, "check_host", lambda subject: [error("a.b", "2", "mend it")])
    assert cli.main(["doctor"]) == 1


def test_the_report_for_programs_is_all_that_is_printed(subjects, capsys):
    assert doctor.main(["--json", "--device", "cpu"]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert [f["check"] for f in printed["findings"]] == ["a.b"]


@pytest.mark.parametrize(
    ("line", "said"),
    [
        (["--device", "tpu"], "invalid choice: 'tpu'"),
        (["training.train_iters=2"], "changes a configuration: give --config-name"),
        (["--config-name", "no_such"], "no_such"),
        (["--cluster"], "--cluster needs a Ray cluster"),
    ],
)
def test_mistakes_on_the_command_line_are_2(line, said, subjects, monkeypatch, capsys):
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    assert doctor.main(line) == 2
    printed = capsys.readouterr().err
    assert printed.startswith("error: ") and said in printed


def test_folder_and_device_of_a_configuration_are_looked_at(subjects, tmp_path):
    changes = f"training.output_dir={tmp_path}/run", "device.kind=cpu", "device.resource_name=mine"
    assert doctor.main(["-cn", "ppo_trainer_tiny", *changes]) == 0
    assert subjects == [Subject(DeviceKind.CPU, f"{tmp_path}/run", "mine")]


def test_a_wrong_configuration_is_a_finding_beside_the_others(subjects, capsys):
    assert doctor.main(["-cn", "ppo_trainer_tiny", "training.train_iters=-1", "--json"]) == 1
    findings = json.loads(capsys.readouterr().out)["findings"]
    assert [(f["check"], f["status"]) for f in findings] == [("config", "error"), ("a.b", "ok")]
