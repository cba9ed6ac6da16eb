"""Secrets of the workers in every spelling: none reaches a run directory, a plan or a console."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from mindspeed_rlxf.cli.train import main
from mindspeed_rlxf.config.compose import compose
from mindspeed_rlxf.config.resolve import resolve
from mindspeed_rlxf.config.withheld import reveal
from mindspeed_rlxf.reporting.run_dir import RunDirectory

CANARY = "Canary0f5E9b"
LITERAL = {
    "HF_TOKEN": CANARY,
    "WANDB_API_KEY": CANARY,
    "db-password": CANARY,
    "OPENAI_KEY": f"sk-{CANARY}{CANARY}",
    "PLAIN": f"ghp_{CANARY}{CANARY}",
    "MIRROR": f"https://user:{CANARY}@mirror/simple",
    "HEADER": f"Bearer {CANARY}{CANARY}",
}
CASES = [
    *((f"{{{name}: '{value}'}}", name, value) for name, value in LITERAL.items()),
    ("{PLAIN: '${oc.env:RLXF_CANARY}'}", "PLAIN", CANARY),
    ("{HF_TOKEN: '${oc.env:RLXF_CANARY}'}", "HF_TOKEN", CANARY),
    ("{PLAIN: 'a-${oc.env:RLXF_CANARY}-b'}", "PLAIN", f"a-{CANARY}-b"),
    (f"{{HF_TOKEN: '${{oc.env:NOT_THERE,{CANARY}}}'}}", "HF_TOKEN", CANARY),
    ("{PLAIN: '${oc.decode:${oc.env:RLXF_CANARY}}'}", "PLAIN", CANARY),
    ("{PLAIN: '${training.run_name}'}", "PLAIN", "shown"),
    ("'${oc.decode:${oc.env:RLXF_CANARY_MAP}}'", "PLAIN", CANARY),
]


@pytest.fixture(autouse=True)
def prepare(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("RAY_ADDRESS", "local")
    monkeypatch.setenv("RLXF_CANARY", CANARY)
    monkeypatch.setenv("RLXF_CANARY_MAP", f"{{PLAIN: {CANARY}}}")
    monkeypatch.delenv("WORLD_SIZE", raising=False)


def everything_below(folder: Path) -> str:
    return "\n".join(p.read_text() for p in folder.rglob("*") if p.is_file())


@pytest.mark.parametrize(("written", "name", "value"), CASES, ids=range(len(CASES)))
def test_no_file_and_no_output_has_the_value(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], written: str, name: str, value: str
) -> None:
    directory = tmp_path / "configs"
    directory.mkdir()
    (directory / "mine.yaml").write_text(
        "defaults: [ppo_trainer_tiny, _self_]\n"
        f"device: {{kind: cpu}}\ntraining: {{run_name: shown}}\nresource_pool:\n  env: {written}\n"
    )
    config = resolve(compose("mine", config_dir=directory), "mine")
    assert reveal(config.pool_settings.env)[name] == value  # the workers have it
    assert main(["--config-name", "mine", "--config-dir", str(directory), "--cfg", "job"]) == 0
    main(["--config-name", "mine", "--config-dir", str(directory), "dry_run=true"])
    run = RunDirectory.create(config)
    run.unlock()
    told = capfd.readouterr()
    assert name in told.out
    shown = told.out + told.err + everything_below(run.path)
    assert CANARY not in shown


@pytest.mark.parametrize(
    "env",
    [
        {"HF_TOKEN": "***", "OTHER": "x"},
        {"TP_TOKEN": "***"},
        {"***": "***"},
    ],
)
def test_a_mask_that_stands_for_nothing_is_one_line(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], env: dict[str, Any]
) -> None:
    (tmp_path / "mine.yaml").write_text(
        "defaults: [ppo_trainer_tiny, _self_]\n"
        f"device: {{kind: cpu}}\nresource_pool:\n  env: {env}\n"
    )
    assert main(["--config-name", "mine", "--config-dir", str(tmp_path)]) == 2
    told = capfd.readouterr().err
    errors = [line for line in told.splitlines() if line.startswith("error: resource_pool.env.")]
    assert len(errors) == 1 and "Traceback" not in told
