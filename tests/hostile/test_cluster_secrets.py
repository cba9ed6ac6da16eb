"""Secrets of the workers' variables reach no run directory, plan or console."""

from pathlib import Path

import pytest
import yaml

from mindspeed_rlxf.checkpoint.directory import RunDirectory
from mindspeed_rlxf.cli.train import main
from mindspeed_rlxf.config.compose import compose
from mindspeed_rlxf.config.load import resolve
from mindspeed_rlxf.config.secrets import reveal
from mindspeed_rlxf.ops.planning.plan import plan

CANARY = "Canary0f5E9b"
VALUES = {
    "HF_TOKEN": CANARY, "WANDB_API_KEY": CANARY, "db-password": CANARY,
    "OPENAI_KEY": f"sk-{CANARY}{CANARY}", "MIRROR": f"https://user:{CANARY}@mirror/simple",
    "PLAIN": CANARY,
}  # fmt: skip
WRITTEN = {**VALUES, "PLAIN": "${oc.env:RLXF_CANARY}"}


@pytest.fixture(autouse=True)
def prepare(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("RAY_ADDRESS", "local")
    monkeypatch.setenv("RLXF_CANARY", CANARY)
    monkeypatch.delenv("WORLD_SIZE", raising=False)


def everything_below(folder: Path) -> str:
    return "\n".join(p.read_text() for p in folder.rglob("*") if p.is_file())


def test_no_file_and_no_output_shows_a_secret(tmp_path, capfd):
    directory = tmp_path / "configs"
    directory.mkdir()
    tree = {
        "defaults": ["ppo_trainer_tiny", "_self_"],
        "device": {"kind": "cpu"},
        "training": {"run_name": "shown"},
        "resource_pool": {"env": WRITTEN},
    }
    (directory / "mine.yaml").write_text(yaml.safe_dump(tree))
    config = resolve(compose("mine", config_dir=directory), "mine")
    assert reveal(config.pool_settings.env) == VALUES  # the workers have them
    assert main(["--config-name", "mine", "--config-dir", str(directory), "--cfg", "job"]) == 0
    print(plan(config).text)  # as `dry_run=true` does
    run = RunDirectory.create(config)
    run.unlock()
    printed = capfd.readouterr()
    assert all(name in printed.out for name in VALUES)
    assert CANARY not in printed.out + printed.err + everything_below(run.path)
