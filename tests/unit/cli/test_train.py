"""The train command: exit codes, one line per problem, and nothing on disk for a refused run."""

import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import yaml

from mindspeed_rlxf import cli
from mindspeed_rlxf.cli.train import main
from mindspeed_rlxf.config.problems import MissingFile, Problem, UserError
from mindspeed_rlxf.config.schema import RunConfig

TINY = ["--config-name", "ppo_trainer_tiny", "device.kind=cpu"]
PREPARED = SimpleNamespace(notices=["a note of the data"], train_prompts=["1+1="])


@pytest.fixture(autouse=True)
def empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("RAY_ADDRESS", "local")
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    return tmp_path


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[RunConfig]:
    """Stands in for the trainer; holds the configurations that were started."""
    runs: list[RunConfig] = []

    def run(config: RunConfig, prepared: SimpleNamespace) -> int:
        assert prepared is PREPARED
        runs.append(config)
        return 75

    replace_trainer(monkeypatch, prepare=lambda config: PREPARED, run=run)
    return runs


def replace_trainer(monkeypatch: pytest.MonkeyPatch, **functions: Any) -> None:
    for module_name, name in (("preflight", "prepare"), ("run", "run")):
        module = ModuleType(f"mindspeed_rlxf.trainer.{module_name}")
        setattr(module, name, functions.get(name))
        monkeypatch.setitem(sys.modules, module.__name__, module)


def refuse(_config: RunConfig) -> str:
    raise UserError(
        [Problem("data.train_files", "no such\n file", colon=True), Problem("second", "")]
    )


def test_run_gets_the_configuration_and_gives_the_exit_code(started):
    assert main([*TINY, "training.train_iters=7"]) == 75
    (config,) = started
    assert (config.name, config.training.train_iters) == ("ppo_trainer_tiny", 7)


def test_cfg_job_prints_the_complete_typed_yaml(capsys):
    assert main([*TINY, "--cfg", "job"]) == 0
    tree = yaml.safe_load(capsys.readouterr().out)
    assert tree["critic"]["cliprange_value"] == 3.0
    assert tree["resource_pool"]["main"] == [2]


def test_an_override_of_hydra_itself_is_noted(started, capsys):
    assert main([*TINY, "hydra.run.dir=elsewhere"]) == 75
    notes = [line for line in capsys.readouterr().out.splitlines() if line.startswith("note: ")]
    assert any("hydra.run.dir=elsewhere" in note for note in notes)


def test_dry_run_prints_the_plan_and_starts_nothing(started, capsys):
    assert main([*TINY, "dry_run=true"]) == 0
    output = capsys.readouterr().out
    assert "Batch of an iteration" in output and output.endswith("note: a note of the data\n")
    assert started == []


def test_dry_run_prints_the_plan_and_every_problem(monkeypatch, capsys):
    replace_trainer(monkeypatch, prepare=refuse)
    assert main([*TINY, "dry_run=true"]) == 2
    output = capsys.readouterr()
    assert "Batch of an iteration" in output.out
    assert output.err == "error: data.train_files: no such file\nerror: second\n"


def test_files_are_checked_beside_wrong_keys(empty_folder, capsys):
    (empty_folder / "empty.jsonl").write_text("")
    (empty_folder / "broken.jsonl").write_text("{")
    overrides = ["training.trian_iters=3", "data.train_files=[empty.jsonl,broken.jsonl]"]
    assert main([*TINY, *overrides, "dry_run=true"]) == 2
    lines = capsys.readouterr().err.splitlines()
    keys = "training.trian_iters", "actor_rollout.load", "training.tokenizer_name_or_path"
    keys += "data.val_files", "empty.jsonl: ", "broken.jsonl:1"
    for key in keys:
        assert sum(key in line for line in lines) == 1, key


@pytest.mark.parametrize(("changes", "code"), [([], 2), (["device.memory_gib=64"], 0)])
def test_a_missing_file_is_an_error_of_a_plan_for_this_host(monkeypatch, changes, code):
    def refuse(_config: RunConfig) -> None:
        raise UserError(MissingFile("actor_rollout.load", "is not there"))

    replace_trainer(monkeypatch, prepare=refuse)
    assert main([*TINY, "dry_run=true", *changes]) == code


BAD = {
    "misspelt key": ["training.trian_iters=3"], "misspelt section": ["trainig.train_iters=3"],
    "wrong type": ["training.train_iters=ten"], "negative": ["actor_rollout.lr=-1"],
    "out of range": ["algorithm.gamma=1.5"], "no iterations": ["training.train_iters=0"],
    "batch": ["training.global_batch_size=255"],
    "mini-batch": ["actor_rollout.ppo_mini_batch_size=100"],
    "devices": ["resource_pool.main=100000"],
    "tensor parallel": ["actor_rollout.tensor_model_parallel_size=3"],
    "pipeline parallel": ["critic.pipeline_model_parallel_size=4"],
    "override": ["training.train_iters"], "model": ["model=[nothing]"],
}  # fmt: skip


@pytest.mark.parametrize("overrides", BAD.values(), ids=BAD.keys())
def test_bad_input_exits_2_with_error_lines_and_writes_nothing(
    overrides, started, empty_folder, capsys
):
    assert main([*TINY, *overrides]) == 2
    output = capsys.readouterr()
    lines = output.err.splitlines()
    assert lines and all(line.startswith("error: ") for line in lines)
    assert output.out == "" and started == []
    assert list(empty_folder.iterdir()) == []


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "error: --config-name is required; built-in names: grpo_trainer_llama31_8b_1node, "),
        (["--config-name", "nope"], "error: --config-name nope: no such config in "),
        (["--config-name"], "error: argument --config-name/-cn: expected one argument"),
        (["--no-such-option"], "error: unrecognized arguments: --no-such-option"),
        ([*TINY, "--cfg", "hydra"], "error: argument --cfg/-c: invalid choice: 'hydra'"),
    ],
)
def test_bad_command_line_is_one_error_line(arguments, message, capsys):
    assert main(arguments) == 2
    error = capsys.readouterr().err
    assert error.startswith(message) and len(error.splitlines()) == 1


def test_installed_command_finds_its_subcommands(started, capsys):
    assert cli.main(["train", *TINY]) == 75
    assert cli.main(["tarin"]) == 2
    assert capsys.readouterr().err.startswith("error: tarin: no such command")
    assert cli.main([]) == 0


def test_a_command_of_another_tool_is_answered_with_ours(capsys):
    assert cli.main(["init"]) == 2
    assert "did you mean new?" in capsys.readouterr().err
