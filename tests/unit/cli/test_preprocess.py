"""The preprocess command: its flags, exit codes and one line per problem; the guide's command."""

import json
import os
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from megatron.core.datasets.indexed_dataset import IndexedDataset

from mindspeed_rlxf import cli
from mindspeed_rlxf.cli import command_line
from mindspeed_rlxf.cli.preprocess import main
from tests.unit.data.byte_tokenizer import byte_tokenizer, write_tokenizer

REPO = Path(__file__).parents[3]
PROMPTS = ["The film was", "电影 was a", "I felt that"]
GUIDE = """
mkdir ./dataset/llama3-hf/

{python} {repo}/preprocess_data.py \\
    --input ./dataset/descriptiveness-00000-of-00001.parquet \\
    --tokenizer-name-or-path ./model_from_hf/llama3-hf/ \\
    --output-prefix ./dataset/llama3-hf/descriptiveness \\
    --workers 16 \\
    --log-interval 1000 \\
    --tokenizer-type PretrainedFromHF \\
    --handler-name  PPOAlpacaStyleInstructionHandler \\
    --prompt-type llama3 \\
    --map-keys '{{"prompt":"prompt", "query":"", "response": "prompt", "system":""}}'
"""


pytestmark = pytest.mark.usefixtures("preprocess_environment")


@pytest.fixture
def required(tmp_path: Path) -> list[str]:
    write_tokenizer(tmp_path / "tokenizer")
    rows = [{"instruction": text, "input": "now", "output": "no"} for text in PROMPTS]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    return [
        "--input", "rows.jsonl", "--tokenizer-name-or-path", "tokenizer", "--output-prefix",
        "new/folder/set",
    ]  # fmt: skip


def texts(prefix: str) -> list[str]:
    found = IndexedDataset(f"{prefix}_packed_input_ids_document")
    return [byte_tokenizer().decode(found[i].tolist()) for i in range(len(found))]


@pytest.mark.parametrize("program", ["function", pytest.param("shell", marks=pytest.mark.long)])
def test_the_command_of_the_guide_runs_as_it_stands(tmp_path, program):
    """As a function without worker processes, and in a shell."""
    (tmp_path / "dataset").mkdir()
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    rows = [{"prompt": text, "chosen": messages, "rejected": messages} for text in PROMPTS]
    file = tmp_path / "dataset" / "descriptiveness-00000-of-00001.parquet"
    pq.write_table(pa.Table.from_pylist(rows), file)
    write_tokenizer(tmp_path / "model_from_hf" / "llama3-hf")
    command = GUIDE.format(python=sys.executable, repo=REPO)
    if program == "shell":
        done = subprocess.run(["sh", "-c", command], cwd=tmp_path, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
    else:
        (tmp_path / "dataset" / "llama3-hf").mkdir()
        words = shlex.split(command.replace("\\\n", " ").replace("16", "1"))
        assert main(words[words.index("--input") :]) == 0
    prefix = str(tmp_path / "dataset" / "llama3-hf" / "descriptiveness")
    header = "<|start_header_id|>{}<|end_header_id|>\n\n"
    assert texts(prefix) == [
        f"<|begin_of_text|>{header.format('user')}{text}<|eot_id|>{header.format('assistant')}"
        for text in PROMPTS
    ]
    chosen = IndexedDataset(f"{prefix}_packed_chosen_document")
    assert json.loads(chosen[2].tobytes()) == messages


def test_defaults_are_those_of_alpaca_rows(required, capsys, monkeypatch):
    monkeypatch.setattr(command_line, "LINE_S", 0.0)
    assert cli.main(["preprocess", *required, "--log-interval", "2"]) == 0
    assert texts("new/folder/set") == [f"{text}\nnow" for text in PROMPTS]
    output = capsys.readouterr()
    assert output.out.split("\n")[:2] == [
        "rows read                         3",
        "rows written                      3",
    ]
    assert "3.00 rows [" in output.err


def test_dropped_rows_and_skipped_files_are_reported(required, tmp_path, capsys):
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "notes.txt").touch()
    (tmp_path / "folder" / "empty.jsonl").touch()
    (tmp_path / "bad.jsonl").write_text('{"instruction": 1}\n{"instruction": "abcdef"}\n')
    extra = ["--input", "rows.jsonl", "folder", "bad.jsonl"]
    flags = ["--seq-length", "5", "--overlong", "keep-tail"]
    assert main([*required, *extra, *flags]) == 0
    output = capsys.readouterr()
    assert "dropped, wrong type               1" in output.out
    assert "truncated (--seq-length)          4" in output.out
    assert "dropped rows: new/folder/set_rejected.jsonl" in output.out
    assert output.err == "note: folder/notes.txt is skipped: files of its type are not read\n"
    assert texts("new/folder/set")[-1] == "bcdef"


@pytest.mark.parametrize(
    ("flags", "problem"),
    [
        (["--worker", "2"], "--worker: no such option; did you mean --workers?"),
        (["--zzz"], "--zzz: no such option; remove it; --help lists the options"),
        (["--seq-lenght=5"], "--seq-lenght=5: no such option; did you mean --seq-length?"),
        (["--handler-name", "AlpacaStylePairwiseHandler"],
         "--handler-name=AlpacaStylePairwiseHandler is not supported: pairs are not "),
        (["--handler-name", "PPOAlpacaStyleHandler"],
         "--handler-name=PPOAlpacaStyleHandler is not supported: "),
        (["--dataset-additional-keys", "labels"],
         "--dataset-additional-keys must name columns, no row has 'labels' (there are "),
        (["--prompt-type", "lama3"], "argument --prompt-type: invalid choice"),
        (["--overlong", "drop"], "--overlong=drop needs --seq-length; "),
        (["--workers", "0"], "argument --workers: 0 must be 1 or more"),
        (["--workers", "two"], "argument --workers: invalid number value: 'two'; see --help"),
        (["--map-keys", "{'a': 1}"], "--map-keys must be a JSON object such as"),
        (["--input", "gone.jsonl"], "--input gone.jsonl: no such file or folder; correct"),
        (["--tokenizer-name-or-path", "gone"], "--tokenizer-name-or-path='gone' must be a folder"),
        (["--map-keys", '{"prompt": "x"}'], "a row must be left, of 3 rows none is"),
        (["--seq-length", "3", "--overlong", "error"], "rows.jsonl:1: a prompt must fit"),
        (["--seq-length", "15", "--strict"], "--strict: no row may be dropped, 2 are; mend them"),
    ],
)  # fmt: skip
def test_a_mistake_exits_2_with_error_lines_and_leaves_nothing(
    flags, problem, required, tmp_path, capsys
):
    assert main([*required, *flags]) == 2
    output = capsys.readouterr()
    lines = output.err.splitlines()
    assert all(line.startswith("error: ") for line in lines) and output.out == ""
    assert lines[0].startswith(f"error: {problem}"), lines
    assert [path for path in (tmp_path / "new").rglob("*") if path.is_file()] == []


@pytest.mark.long
def test_letters_of_any_script_work_in_an_ascii_locale(tmp_path):
    """A process of its own: the locale is read once, at start."""
    folder = tmp_path / "数据"
    write_tokenizer(folder / "分词器")
    (folder / "题.jsonl").write_text('{"prompt": "二加二"}\n{"prompt": 2}\n', encoding="utf-8")
    command = [
        sys.executable, str(REPO / "preprocess_data.py"), "--input", "数据/题.jsonl",
        "--tokenizer-name-or-path", "数据/分词器", "--output-prefix", "数据/出/集", "--map-keys",
        '{"prompt": "prompt"}', "--workers", "2",
    ]  # fmt: skip
    done = subprocess.run(
        command, cwd=tmp_path, env={**os.environ, "LC_ALL": "C"}, capture_output=True
    )
    assert done.returncode == 0, done.stderr
    assert "written: 数据/出/集_packed_*" in done.stdout.decode("utf-8")
    assert texts(str(folder / "出" / "集")) == ["二加二"]
    rejected = json.loads((folder / "出" / "集_rejected.jsonl").read_text(encoding="utf-8"))
    assert rejected["file"] == "数据/题.jsonl"


@pytest.mark.long
def test_a_killed_run_leaves_no_data_set_and_the_next_one_works(required, tmp_path):
    """It is killed with most of a long file before it."""
    (tmp_path / "long.jsonl").write_text('{"instruction": "a"}\n' * 2_000_000)
    command = [sys.executable, str(REPO / "preprocess_data.py"), *required, "--workers", "2"]
    deadline = time.monotonic() + 60
    run = subprocess.Popen([*command, "--input", "long.jsonl"])
    partial = tmp_path / "new" / "folder" / ".set_packed.partial"
    while not partial.is_dir() and time.monotonic() < deadline:
        time.sleep(0.05)
    assert partial.is_dir() and run.poll() is None
    run.send_signal(signal.SIGKILL)
    run.wait(timeout=10)
    assert list((tmp_path / "new" / "folder").iterdir()) == [partial]
    while main(required) == 2 and time.monotonic() < deadline:  # its workers end within a second
        time.sleep(0.2)
    assert len(texts("new/folder/set")) == 3 and not partial.exists()
