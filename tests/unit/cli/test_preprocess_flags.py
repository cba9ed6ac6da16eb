"""Every flag of the older toolkit's `preprocess_data.py` works, is noted, or is refused."""

import json
from pathlib import Path

import pytest

from mindspeed_rlxf.cli.preprocess import main
from mindspeed_rlxf.compat.mindspeed_llm.flags import PREPROCESS_FLAGS
from tests.unit.data.byte_tokenizer import write_tokenizer

# Typed from the parser of the older toolkit, not taken from our lists.
OTHER_DATA = [
    "--input more.jsonl", "--handler-name R1AlpacaStyleInstructionHandler", "--prompt-type llama3",
    "--dataset-additional-keys input", "--max-samples 1", '--map-keys {"query":""}',
    "--tokenizer-name-or-path framed", "--seq-length 9",
]  # fmt: skip
SAME_DATA = [
    "--tokenizer-type PretrainedFromHF", "--workers 2", "--log-interval 7",
]  # fmt: skip
NO_EFFECT = [
    "--streaming", "--cache-dir ~/tmp", "--overwrite-cache", "--seed 7", "--mix-strategy concat",
    "--pad-to-multiple-of 8", "--make-vocab-size-divisible-by 1", "--pad-vocab-size-to 512",
    "--dataset-impl mmap", "--n-subs 4", "--append-eod", "--tokenizer-not-use-fast",
]  # fmt: skip
REFUSED = [
    "--hf-datasets-params set.json", "--datasets a,b", "--json-keys text", "--json-keys text b",
    "--split-sentences", "--keep-newlines", "--prompt-type-path templates.json",
    "--interleave-probs 0.5,0.5", "--mix-strategy interleave_under",
    "--mix-strategy interleave_over", "--dataset-dir folder", "--pack", "--neat-pack",
    "--script-data-dir folder", "--vocab-file vocab.json", "--merge-file merges.txt",
    "--tokenizer-model tokenizer.model", "--placeholder-token x", "--reward-tokens + -",
    "--dataset-impl lazy", "--merge-group-keys packed_input_ids_document",
]  # fmt: skip
NAMES = {words.split()[0] for words in OTHER_DATA + SAME_DATA + NO_EFFECT + REFUSED}
PREFIX = "new/set"


@pytest.fixture(autouse=True)
def files(preprocess_environment: None, tmp_path: Path) -> None:
    write_tokenizer(tmp_path / "tokenizer")
    write_tokenizer(tmp_path / "framed", frame="<s> $A")
    rows = [{"instruction": text, "input": "x", "output": "y"} for text in ("sweet", "bitter" * 3)]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    (tmp_path / "more.jsonl").write_text(json.dumps(rows[0]), encoding="utf-8")


def run(*flags: str) -> int:
    required = "--input rows.jsonl --tokenizer-name-or-path tokenizer --overwrite --output-prefix"
    return main([*required.split(), PREFIX, *flags])


def data(*flags: str) -> dict[str, bytes]:
    """The data set that the command writes."""
    assert run(*flags) == 0
    return {file.name: file.read_bytes() for file in Path(PREFIX).parent.glob("*.bin")}


def notes(capsys: pytest.CaptureFixture[str]) -> list[str]:
    return capsys.readouterr().err.splitlines()


def test_each_flag_is_on_a_list_and_no_list_has_another():
    assert len(NAMES) == 40
    assert set(PREPROCESS_FLAGS) <= NAMES


@pytest.mark.parametrize("words", OTHER_DATA)
def test_a_flag_changes_the_data(words, capsys):
    before = data()
    assert data(*words.split()) != before
    assert notes(capsys) == []


@pytest.mark.parametrize("words", SAME_DATA)
def test_a_flag_is_taken_that_leaves_the_data_as_it_is(words, capsys):
    assert data(*words.split()) == data()
    assert notes(capsys) == []


@pytest.mark.parametrize("words", NO_EFFECT)
def test_a_flag_without_effect_gets_one_line(words, capsys):
    assert data(*words.split()) == data()
    (line,) = notes(capsys)
    assert line.startswith(f"note: {words.split()[0]} has no effect: ")


@pytest.mark.parametrize("words", REFUSED)
def test_a_flag_of_an_unsupported_feature_is_refused(words, capsys):
    assert run(*words.split()) == 2
    (line,) = notes(capsys)
    name, _, value = words.partition(" ")
    told = name if line.startswith(f"error: {name} ") else f"{name}={value}"
    assert line.startswith(f"error: {told} is not supported: ") and not Path("new").exists()
