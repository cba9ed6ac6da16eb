"""The example scripts convert a tiny model to Megatron and back."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from mindspeed_rlxf.models.parameters import Head
from tests.unit.weights.folders_of import assert_same, make_folder, read_folder

SCRIPTS = Path(__file__).resolve().parents[3] / "examples" / "mcore"
FAMILIES = {"llama2": "llama", "llama3": "llama", "llama32": "tied", "qwen25": "qwen2"}
FAMILIES |= {"qwen3": "qwen3"}


def run(model: str, name: str, *arguments: str, **variables: str) -> None:
    script = SCRIPTS / model / f"ckpt_convert_{model}_{name}.sh"
    environment = {**os.environ, "PYTHON": sys.executable, **variables}
    done = subprocess.run(
        ["bash", str(script), *arguments], env=environment, capture_output=True, text=True,
        timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr


@pytest.mark.long
@pytest.mark.parametrize("model", FAMILIES)
@pytest.mark.parametrize("scored", [False, True], ids=["model", "reward"])
def test_the_scripts_of_a_model_convert_there_and_back(
    tmp_path: Path, model: str, scored: bool
) -> None:
    head = Head.SCORE if scored else Head.LANGUAGE_MODEL
    tensors = make_folder(tmp_path / "hf", FAMILIES[model], head)
    hf, mg = str(tmp_path / "hf"), str(tmp_path / "mg")
    there, orm = ("hf2mcore_orm", ["--orm"]) if scored else ("hf2mcore", [])
    run(model, there, HF_DIR=hf, SAVE_DIR=mg, TP="2", PP="2")
    assert (tmp_path / "mg/iter_0000001/mp_rank_01_001").is_dir()
    run(model, "mcore2hf", *orm, LOAD_DIR=mg, HF_DIR=hf)
    assert_same(read_folder(tmp_path / "hf" / "mg2hf"), tensors)
