"""Merging indexed data sets merges their sidecars, or is refused where these differ."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mindspeed_rlxf.config.problems import UserError
from mindspeed_rlxf.config.schema import DataConfig
from mindspeed_rlxf.data.handlers import MapKeys
from mindspeed_rlxf.data.indexed_prompts import IndexedWriter, load_indexed_prompts
from mindspeed_rlxf.data.preprocessing.writer import merge
from mindspeed_rlxf.data.sidecar import read_sidecar
from mindspeed_rlxf.data.tokenizer import load_tokenizer
from tests.unit.data.bench import Bench
from tests.unit.data.plain_pairs import write_pair

COLUMNS = ("input_ids", "attention_mask", "answer")
KEYS = tuple(f"packed_{column}_document" for column in COLUMNS)
ROWS: dict[str, list[Any]] = {
    "b": [{"prompt": "3+3=", "answer": "6"}],
    "a": [{"prompt": "1+1=", "answer": "2"}, {"prompt": 7}, {"prompt": "2+2=", "answer": "4"}],
}


@pytest.fixture
def sets(bench: Bench, tmp_path: Path) -> Path:
    """A folder with the sets `a`, one of whose rows is rejected, and `b`."""
    for name, rows in ROWS.items():
        file, prefix = bench.write(f"{name}.jsonl", *rows), str(tmp_path / "sets" / name)
        bench.run(file, output_prefix=prefix, template="qwen", map_keys=MapKeys("prompt", None))
    return tmp_path / "sets"


def change(sets: Path, name: str, edit: Callable[[dict[str, Any]], Any]) -> None:
    """Of a set's sidecar."""
    file = sets / f"{name}_packed_meta.json"
    tree = json.loads(file.read_text(encoding="utf-8"))
    edit(tree)
    file.write_text(json.dumps(tree), encoding="utf-8")


def problems_of(sets: Path, keys: tuple[str, ...] = KEYS) -> list[str]:
    """Of a refused merge, which must write nothing."""
    with pytest.raises(UserError) as error:
        merge(str(sets), keys, str(sets.parent / "out" / "all"))
    assert not (sets.parent / "out").exists()
    return list(map(str, error.value.problems))


def test_the_merged_set_is_trained_on_as_its_parts_are(sets: Path, tokenizer_folder: str) -> None:
    output = sets.parent / "out" / "all"
    change(sets, "b", lambda t: t["tokenizer"].update(path="elsewhere"))  # has the same sha256
    merged = merge(str(sets), KEYS, str(output))
    assert merged == {f"{output}_{key}": 3 for key in KEYS}
    keys = DataConfig(data_path=("unused",), default_data_source="x", ground_truth_key="answer")

    def prompts(*prefixes: Path) -> Any:
        names = [str(prefix) for prefix in prefixes]
        found = load_indexed_prompts(names, load_tokenizer(tokenizer_folder), keys, 1000)
        rows = [(p.index, p.text, p.token_ids.tolist(), p.ground_truth) for p in found.prompts]
        return rows, found.stop_token_ids

    assert prompts(output) == prompts(sets / "a", sets / "b")
    assert [truth for *_, truth in prompts(output)[0]] == ["2", "4", "6"]
    ours, first = read_sidecar(output), read_sidecar(sets / "a")
    assert ours.model_copy(update={"counts": first.counts}) == first
    tokens = [read_sidecar(sets / name).counts.pop("tokens") for name in "ab"]
    assert ours.counts.pop("tokens") == sum(tokens)  # type: ignore[arg-type]
    dropped = first.counts["dropped"]
    assert ours.counts == {"rows_read": 4, "rows_written": 3, "dropped": dropped, "cut": 0}
    rejected = (sets / "a_rejected.jsonl").read_text(encoding="utf-8")
    assert Path(f"{output}_rejected.jsonl").read_text(encoding="utf-8") == rejected
    assert len(list(output.parent.iterdir())) == 2 * len(KEYS) + 2


EDITS: dict[str, Callable[[dict[str, Any]], Any]] = {
    "template of a is qwen, of b llama3": lambda t: t.update(template="llama3"),
    "stop_token_ids of a is [4], of b [4, 9]": lambda t: t.update(stop_token_ids=[9, 4]),
    "tokenizer sha256 of a is ": lambda t: t["tokenizer"].update(sha256="0" * 64),
    "allow_special_tokens of a is False, of b True": lambda t: t.update(allow_special_tokens=True),
    "handler of a is PPOAlpacaStyleInstructionHandler, of b R1": lambda t: t.update(
        handler="R1AlpacaStyleInstructionHandler"
    ),
    "columns of a is ['answer (answer, uint8, json)', ": lambda t: t["columns"].pop(),
}


@pytest.mark.parametrize("said", EDITS)
def test_what_differs_between_sets_is_named(sets: Path, said: str) -> None:
    change(sets, "b", EDITS[said])
    if said.startswith("columns"):
        for file in sets.glob("b_packed_answer_*"):
            file.unlink()
    (problem,) = problems_of(sets)
    assert f"sets must be made alike, {said}" in problem
    assert problem.endswith(f"or train on data.data_path=[{sets / 'a'},{sets / 'b'}]")


def test_all_columns_have_to_be_named_by_their_whole_name(sets: Path) -> None:
    for keys in (KEYS[:1], ("input_ids",)):
        (problem,) = problems_of(sets, keys)
        assert problem.endswith(f"it is {keys[0]}; give {' '.join(KEYS)}")


def test_sets_of_both_kinds_are_not_mixed(sets: Path) -> None:
    for column in COLUMNS:
        write_pair(sets / f"old_packed_{column}_document", [[1]], 4 if "_" in column else 1)
    problems = problems_of(sets)
    assert len(problems) == len(COLUMNS)
    assert "old_packed_answer_document: must have a sidecar, as " in problems[0]


@pytest.mark.parametrize(
    ("file", "damage", "problem"),
    [
        ("b_packed_answer_document.idx", lambda index: [index.unlink(),
         index.with_suffix(".bin").unlink()],
         "b_packed_answer_document: must be whole, there is no b_packed_answer_document.idx; "),
        ("a_packed_meta.json", lambda file: file.write_text('{"format_version": 2}'),
         "a_packed_meta.json: format_version is not valid (Input should be 1)"),
    ],
)  # fmt: skip
def test_a_damaged_set_is_named(
    file: str, damage: Callable[[Path], Any], problem: str, sets: Path
) -> None:
    damage(sets / file)
    (found,) = problems_of(sets)
    assert found.startswith(f"{sets}/{problem}")


def test_rows_of_a_set_that_do_not_stand_side_by_side_are_not_merged(sets: Path) -> None:
    """a has 2 rows and 1 answer, b 1 row and 2 answers: the sums agree."""
    for name, rows in (("a", 1), ("b", 2)):
        write_pair(sets / f"{name}_packed_answer_document", [[48]] * rows, code=1)
    (problem,) = problems_of(sets)
    assert "must have equally many sequences (packed_input_ids_document 2+1, " in problem


def test_an_existing_merged_set_stays_until_overwrite_has_written_a_whole_one(
    sets: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    output = sets / "all"
    write_pair(sets / "all_packed_labels_document", [[1]])  # a column that the new set lacks
    with pytest.raises(UserError, match=r"must be new, all_packed_labels_document.idx exists"):
        merge(str(sets), KEYS, str(output))
    merge(str(sets), KEYS, str(output), overwrite=True)
    assert not list(sets.glob("all_packed_labels*"))
    before = {file.name: file.read_bytes() for file in sets.glob("all_*")}
    with pytest.raises(UserError, match=r"must be new, all_packed_\w+.idx exists; take another"):
        merge(str(sets), KEYS, str(output))

    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(IndexedWriter, "close", full)
        with pytest.raises(UserError, match="cannot be written: No space left on device"):
            merge(str(sets), KEYS, str(output), overwrite=True)
    assert {file.name: file.read_bytes() for file in sets.glob("all_*")} == before
    merge(str(sets), KEYS, str(output), overwrite=True)
    assert {file.name: file.read_bytes() for file in sets.glob("all_*")} == before
