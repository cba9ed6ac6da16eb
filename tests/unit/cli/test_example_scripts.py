"""Each example script gives `preprocess` a command that runs, here on a few rows."""

import json
import os
import subprocess
from pathlib import Path

import pytest

from mindspeed_rlxf.cli.preprocess import main
from mindspeed_rlxf.data.sidecar import read_sidecar
from tests.unit.data.byte_tokenizer import write_tokenizer

REPO = Path(__file__).parents[3]
SCRIPTS = sorted(REPO.glob("examples/mcore/*/data_convert_*_ppo.sh"))
TEMPLATE_OF = {name: name for name in ("llama2", "llama3", "qwen25", "qwen3")}
TEMPLATE_OF |= dict.fromkeys(("llama31", "llama32"), "llama3")
RECORD = '#!/bin/sh\nfor argument in "$@"; do printf "%s\\0" "$argument"; done > "$RECORDED"\n'
ROW = {"prompt": "1+1", "question": "1+1", "instruction": "1+1", "answer": "2", "output": "2"}


def run(script: Path, folder: Path, *arguments: str, **variables: str) -> list[str]:
    """The command line that the script hands to Python."""
    python = folder / "python"
    python.write_text(RECORD)
    python.chmod(0o755)
    environment = {"PATH": os.environ["PATH"], "PYTHON": str(python), **variables}
    environment |= {"RECORDED": str(folder / "recorded"), "TOKENIZER": str(folder / "tokenizer")}
    command = ["bash", str(script), *arguments]
    subprocess.run(command, check=True, env=environment, cwd=folder, timeout=60)
    return (folder / "recorded").read_text(encoding="utf-8").split("\0")[:-1]


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.parent.name)
def test_a_script_makes_prompts_of_its_familys_template(script, tmp_path, monkeypatch):
    monkeypatch.setenv("TOKENIZERS_PARALLELISM", "false")
    monkeypatch.setenv("TORCH_DEVICE_BACKEND_AUTOLOAD", "0")
    write_tokenizer(tmp_path / "tokenizer")
    rows = tmp_path / "my rows.jsonl"
    rows.write_text("\n".join([json.dumps(ROW)] * 3))
    (tmp_path / "set_env.sh").write_text('unused="$NOT_SET"\n')
    variables = {"INPUT": str(rows), "OUTPUT_PREFIX": str(tmp_path / "out" / "set")}
    variables |= {"WORKERS": "1", "CANN_ENV": str(tmp_path / "set_env.sh")}
    command = run(script, tmp_path, "--seq-length", "400", **variables)
    assert Path(command[0]).samefile(REPO / "preprocess_data.py")
    assert main(command[1:]) == 0
    sidecar = read_sidecar(tmp_path / "out" / "set")
    assert sidecar is not None
    assert sidecar.template == TEMPLATE_OF[script.parent.name]
    assert sidecar.counts["rows_written"] == 3
