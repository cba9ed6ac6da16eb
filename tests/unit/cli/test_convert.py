"""The command line of `convert`: options, refusals and their messages."""

import errno
from pathlib import Path
from typing import Any

import pytest

from mindspeed_rlxf.cli.convert import main
from mindspeed_rlxf.weights import tensor_conversion as module
from tests.unit.weights.folders_of import make_folder

WRONG: dict[str, tuple[list[str], str]] = {
    "a misspelt flag": (["--target-tensor-paralel-size=2"],
     "did you mean --target-tensor-parallel"),
    "tp": (["--tp", "3"], "--target-tensor-parallel-size=3 must divide the model's query groups 4"),
    "pp": (["--pp", "3"],
     "=3 must divide the model's 4 layers; use 1 or 2 or 4, or give --num-layer"),
    "ep": (["--ep", "2"], "--target-expert-parallel-size=2 must divide the model's one (dense)"),
    "list": (["--pp", "2", "--num-layer-list", "1,2"], "must be 2 positive numbers"),
    "vpp": (["--pp", "2", "--num-layers-per-virtual-pipeline-stage", "3"],
     "=3 times 2 pipeline ranks must divide the model's 4 layers; use 1 or 2"),
    "both": (["--pp", "2", "--num-layer-list", "2,2", "--num-layers-per-virtual-pipeline-stage",
     "1"], "--num-layer-list must not be given with --num-layers-per-virtual-pipeline-stage"),
    "grouped": (["--moe-grouped-gemm"], "--moe-grouped-gemm is not supported: experts are written"),
    "family": (["--model-type-hf", "mixtrall"], "cannot be converted; did you mean mixtral?"),
    "other family": (["--model-type-hf", "qwen3"],
     "must agree with config.json, whose model_type is"),
    "bias": (["--add-qkv-bias"], "--add-qkv-bias: model_type llama has none; leave it out"),
    "vocabulary": (["--true-vocab-size", "36"], "must be the vocab_size=37 of config.json"),
    "zarr": (["--ckpt-format", "zarr"], "invalid choice: 'zarr' (choose from"),
    "twice": (["--load-dir", "x"], "SOURCE or --load-dir must be given, once"),
}  # fmt: skip


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model") / "hf"
    make_folder(folder, "llama")
    return folder


@pytest.mark.parametrize("case", WRONG)
def test_a_mistake_is_named_and_nothing_is_written(model, tmp_path, case, capsys):
    options, expected = WRONG[case]
    assert main([str(model), str(tmp_path / "mg"), "--to", "mg", *options]) == 2
    said = capsys.readouterr().err
    assert expected in said and all(line.startswith("error: ") for line in said.splitlines())
    assert not list(tmp_path.iterdir())


def test_folders_that_cannot_be_a_target(model, tmp_path, capsys):
    for target in (model, model.parent):
        assert main([str(model), str(target), "--to", "mg", "--force"]) == 2
        assert "must not be the source" in capsys.readouterr().err
    assert main([str(model), str(tmp_path / "x"), "--to", "hf"]) == 2
    assert "is a Hugging Face folder already; use --to mg" in capsys.readouterr().err
    assert main([str(tmp_path / "gone"), str(tmp_path / "x"), "--to", "mg"]) == 2
    assert "gone must be a folder; give the folder of the weights" in capsys.readouterr().err


def test_a_megatron_folder_without_config_json_needs_one(model, tmp_path, capsys):
    assert main([str(model), str(tmp_path / "mg"), "--to", "mg"]) == 0
    (tmp_path / "mg" / "config.json").unlink()
    assert main([str(tmp_path / "mg"), str(tmp_path / "back"), "--to", "hf"]) == 2
    assert "must have a config.json that describes the model; give" in capsys.readouterr().err
    arguments = [str(tmp_path / "mg"), str(tmp_path / "back"), "--to", "hf"]
    assert main([*arguments, "--hf-config", str(model)]) == 0


def test_a_checkpoint_of_a_run_is_converted_by_role(tmp_path, capsys):
    iteration = tmp_path / "checkpoints" / "iter_0000003"
    (iteration / "actor").mkdir(parents=True)
    (iteration / "manifest.json").write_text("{}")
    (iteration.parent / "latest_checkpointed_iteration.txt").write_text("3")
    for source in (iteration, iteration.parent):
        assert main([str(source), str(tmp_path / "x"), "--to", "hf"]) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert line.endswith(f"which holds actor; give {iteration / 'actor'}")


@pytest.mark.parametrize(
    ("error", "code", "said"),
    [
        (ValueError("a file is truncated"), 2, "error: a file is truncated"),
        (PermissionError(errno.EACCES, "Permission denied", "x.pt"), 2, "error: x.pt cannot be re"),
        (OSError(errno.EDQUOT, "Disk quota exceeded"), 75, "run the same command again"),
    ],
)
def test_what_ends_the_writing_is_an_error_line(
    model, tmp_path, error, code, said, monkeypatch, capsys
):
    def write(*_: Any) -> None:
        raise error

    monkeypatch.setattr(module, "copy_side_files", write)
    assert main([str(model), str(tmp_path / "mg"), "--to", "mg"]) == code
    assert said in capsys.readouterr().err


def test_a_run_directory_is_answered_with_the_folders_of_its_newest_checkpoint(tmp_path, capsys):
    checkpoints = tmp_path / "run" / "checkpoints"
    for iteration in (2, 4):
        folder = checkpoints / f"iter_{iteration:07}"
        (folder / "actor").mkdir(parents=True)
        (folder / "manifest.json").write_text("{}")
    (checkpoints / "latest_checkpointed_iteration.txt").write_text("4")
    assert main([str(tmp_path / "run"), str(tmp_path / "hf"), "--to", "hf"]) == 2
    assert f"give {checkpoints / 'iter_0000004' / 'actor'}" in capsys.readouterr().err
