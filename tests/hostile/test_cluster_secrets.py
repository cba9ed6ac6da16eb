"""Secrets of the workers' variables reach no run directory, plan or console."""

from pathlib import Path
from typing import Any

import pytest
import yaml

from mindspeed_rlxf.checkpoint.directory import RunDirectory
from mindspeed_rlxf.cli.train import main
from mindspeed_rlxf.config.compose import compose
from mindspeed_rlxf.config.load import resolve
from mindspeed_rlxf.config.secrets import reveal
from mindspeed_rlxf.ops.planning.plan import plan

CANARY = "Canary0f5E9b"
LITERAL = {
    "HF_TOKEN": CANARY,
    "WANDB_API_KEY": CANARY,
    "db-password": CANARY,
    "OPENAI_KEY": f"sk-{CANARY}{CANARY}",
    "MIRROR": f"https://user:{CANARY}@mirror/simple",
}
INTERPOLATED = {
    "PLAIN": ("${oc.env:RLXF_CANARY}", CANARY),
    "OTHER_TOKEN": ("${oc.env:RLXF_CANARY}", CANARY),
    "PART": ("a-${oc.env:RLXF_CANARY}-b", f"a-{CANARY}-b"),
    "DEFAULT_KEY": (f"${{oc.env:NOT_THERE,{CANARY}}}", CANARY),
    "DECODED": ("${oc.decode:${oc.env:RLXF_CANARY}}", CANARY),
    "NAME": ("${training.run_name}", "shown"),
}
CASES: dict[str, tuple[Any, dict[str, str]]] = {
    "literal": (LITERAL, LITERAL),
    "interpolated": (
        {name: written for name, (written, _) in INTERPOLATED.items()},
        {name: value for name, (_, value) in INTERPOLATED.items()},
    ),
    "all at once": ("${oc.decode:${oc.env:RLXF_CANARY_MAP}}", {"PLAIN": CANARY}),
}


@pytest.fixture(autouse=True)
def prepare(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("RAY_ADDRESS", "local")
    monkeypatch.setenv("RLXF_CANARY", CANARY)
    monkeypatch.setenv("RLXF_CANARY_MAP", f"{{PLAIN: {CANARY}}}")
    monkeypatch.delenv("WORLD_SIZE", raising=False)


def everything_below(folder: Path) -> str:
    return "\n".join(p.read_text() for p in folder.rglob("*") if p.is_file())


@pytest.mark.parametrize(("written", "values"), CASES.values(), ids=CASES)
def test_no_file_and_no_output_shows_a_secret(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], written: Any, values: dict[str, str]
) -> None:
    directory = tmp_path / "configs"
    directory.mkdir()
    tree = {
        "defaults": ["ppo_trainer_tiny", "_self_"],
        "device": {"kind": "cpu"},
        "training": {"run_name": "shown"},
        "resource_pool": {"env": written},
    }
    (directory / "mine.yaml").write_text(yaml.safe_dump(tree))
    config = resolve(compose("mine", config_dir=directory), "mine")
    assert reveal(config.pool_settings.env) == values  # the workers have them
    assert main(["--config-name", "mine", "--config-dir", str(directory), "--cfg", "job"]) == 0
    print(plan(config).text)  # as `dry_run=true` does
    run = RunDirectory.create(config)
    run.unlock()
    printed = capfd.readouterr()
    assert all(name in printed.out for name in values)
    assert CANARY not in printed.out + printed.err + everything_below(run.path)
