"""Files of rows become a whole data set, or none; every row is written or counted."""

import datetime
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from mindspeed_rlxf.data.preprocessing import pipeline
from mindspeed_rlxf.data.preprocessing.writer import PromptSetWriter
from tests.unit.data.bench import Bench


def test_prompts_masks_and_columns_have_a_sequence_for_every_row(bench: Bench) -> None:
    file = bench.write(
        "a.jsonl",
        {"prompt": "1+1", "answer": "2", "extra": {"x": [1.5, None, "数"]}},
        {"prompt": "größe", "answer": 7},
        {"prompt": "c", "answer": None, "late": "\ud800"},
    )
    counts = bench.run(file, template="llama3")
    assert (counts.rows_read, counts.rows_written) == (3, 3)
    header = "<|start_header_id|>{}<|end_header_id|>\n\n"
    assert bench.texts()[1] == (
        f"<|begin_of_text|>{header.format('user')}größe<|eot_id|>{header.format('assistant')}"
    )
    assert bench.column("answer") == ["2", 7, None]
    assert bench.column("extra") == [{"x": [1.5, None, "数"]}, None, None]
    assert bench.column("late") == [None, None, "\ud800"]
    masks = [[1] * len(ids) for ids in bench.sequences("input_ids")]
    assert [mask.tolist() for mask in bench.sequences("attention_mask")] == masks
    sidecar = bench.sidecar()
    assert sidecar.stop_token_ids == (9,)  # <|eot_id|>
    assert [(c.name, c.dtype) for c in sidecar.columns] == [
        ("input_ids", "int32"), ("attention_mask", "int32"), ("answer", "uint8"),
        ("extra", "uint8"), ("late", "uint8"),
    ]  # fmt: skip
    assert not Path(f"{bench.prefix}_rejected.jsonl").exists()


def test_every_kind_of_file_of_a_folder_is_read_and_the_others_are_named(bench: Bench) -> None:
    folder = bench.folder / "数据"
    folder.mkdir()
    rows = [{"prompt": "p1", "day": datetime.date(2024, 1, 2), "raw": b"\x00\xff"}]
    pq.write_table(pa.Table.from_pylist(rows), folder / "b.parquet")
    bench.write("数据/a.json", b'\xef\xbb\xbf [{"prompt": "j1"},', b'{"prompt": "j2"}]')
    bench.write("数据/c.json", {"prompt": "l1"})
    bench.write("数据/d.jsonl", {"prompt": "问"}, b"", {"prompt": "l3"})
    for name in ("e.jsonl", "f.parquet", "g.json", "readme.md"):
        (folder / name).touch()
    counts = bench.run(str(folder))
    assert bench.texts() == ["j1", "j2", "p1", "l1", "问", "l3"]
    assert bench.column("day")[2] == "2024-01-02"
    assert bench.column("raw")[2] == "AP8="
    assert counts.skipped == [str(folder / "readme.md")]


def test_every_dropped_row_is_counted_and_kept_beside_the_data_set(bench: Bench) -> None:
    file = bench.write(
        "a.jsonl", {"prompt": "good"}, b"{broken", b"[1]", b'{"prompt": "\xff"}',
        b'{"prompt": ' + b"9" * 5000 + b"}", {"question": "no prompt"}, {"prompt": "  "},
        {"prompt": 5}, {"prompt": "a\ud800"}, {"\ud800key": "no prompt"}, {"prompt": "x" * 3000},
        {"prompt": "fine"},
    )  # fmt: skip
    counts = bench.run(file, max_prompt_length=10)
    expected = [
        (2, "not JSON"), (3, "not an object"), (4, "not JSON"), (5, "not JSON"),
        (6, "no prompt"), (7, "empty prompt"), (8, "wrong type"), (9, "invalid unicode"),
        (10, "no prompt"), (11, "too long"),
    ]  # fmt: skip
    rejected = bench.rejected()
    assert [(r["row"], r["reason"]) for r in rejected] == expected
    assert all(r["file"] == file and "; " in r["problem"] for r in rejected)
    assert rejected[0]["raw"] == "{broken" and len(rejected[-1]["raw"]) == 2000
    assert counts.dropped["not JSON"] == 3 and counts.dropped.total() == 10
    assert (counts.rows_read, counts.rows_written) == (12, 2)
    assert bench.sidecar().counts["dropped"] == dict(counts.dropped)


@pytest.mark.parametrize(
    ("rows", "options", "problem", "places"),
    [
        ([{"prompt": "a"}, {"prompt": 1}, b"{"], {"strict": True},
         "--strict: no row may be dropped, 2 are; ", [2, 3]),
        ([{"question": "a"}, {"question": "b"}], {},
         "a row must be left, of 2 rows none is (dropped: 2 no prompt); ", [1]),
        ([], {}, "a row must be left, of 0 rows none is (the files hold none); ", []),
    ],
)  # fmt: skip
def test_rows_that_make_no_data_set_are_named(
    rows: list[Any], options: dict[str, Any], problem: str, places: list[int], bench: Bench
) -> None:
    file = bench.write("a.jsonl", *rows)
    summary, *found = bench.problems(file, **options)
    assert summary.startswith(problem)
    assert [line.split(": ")[0] for line in found] == [f"{file}:{place}" for place in places]


@pytest.mark.parametrize(
    ("name", "content", "problem"),
    [
        ("a.parquet", b"not parquet", "must be a .parquet file"),
        ("a.json", b"[{broken", "must be a .json file"),
        ("a.csv", b"prompt", "it must be a .jsonl, .json, .parquet file, or"),
        (None, b"", "no such file or folder"),
        ("", b"", "it must be a .jsonl, .json, .parquet file, or"),
    ],
)
def test_an_input_that_cannot_be_read_is_named(
    bench: Bench, name: str | None, content: bytes, problem: str
) -> None:
    path = bench.folder / "in" / (name or "")
    if name is not None:
        (bench.folder / "in").mkdir()
    if name:
        path.write_bytes(content)
    (found,) = bench.problems(str(path))
    assert found.startswith(f"--input {path}: {problem}")


@pytest.mark.parametrize("workers", [1, 3])
def test_a_huge_prompt_is_read_and_later_samples_are_not(bench: Bench, workers: int) -> None:
    text = "数 x" * 100_000
    file = bench.write("a.jsonl", *({"prompt": prompt} for prompt in ("a", text, "b", "c")))
    assert bench.run(file, workers=workers, max_samples=3).rows_read == 3
    assert [len(ids) for ids in bench.sequences("input_ids")] == [1, 500_000, 1]


def test_the_output_does_not_depend_on_the_number_of_processes(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pipeline, "CHUNK_ROWS", 7)
    rows = [{"prompt": "x" * (n % 13), "id": n, f"c{n % 5}": n} for n in range(200)]
    file = bench.write("a.jsonl", *rows)
    written = []
    for workers in (1, 2, 5):
        bench.run(file, workers=workers, max_prompt_length=9, overwrite=True)
        written.append({path.name: path.read_bytes() for path in bench.files()})
    assert written[0] == written[1] == written[2]
    assert len(bench.texts()) == 139  # 200 less 16 empty ones and 3 x 15 of 10, 11 and 12


def test_column_names_are_made_safe_and_stay_apart(bench: Bench) -> None:
    names = ["答案", "a/b", "a b", "A_B", "input_ids", "x" * 300, "_packed_"]
    file = bench.write("a.jsonl", {"prompt": "a", **dict.fromkeys(names, 1)})
    bench.run(file)
    files = {c.name: c.file for c in bench.sidecar().columns if c.encoding == "json"}
    assert list(files) == names
    expected = ["__", "a_b", "a_b_2", "A_B_3", "input_ids_2", "x" * 80, "_pack_"]
    assert list(files.values()) == expected
    assert all(bench.column(file) == [1] for file in files.values())


def test_an_older_data_set_is_replaced_whole_or_not_touched(bench: Bench) -> None:
    bench.run(bench.write("a.jsonl", {"prompt": "old", "gone": 1}, b"{"))
    (problem,) = bench.problems(bench.write("b.jsonl", {"prompt": "new"}))
    assert problem.endswith("set_packed_meta.json exists; take another prefix or give --overwrite")
    bench.problems(bench.write("c.jsonl", {"prompt": 1}), overwrite=True)
    assert bench.texts() == ["old"]
    bench.run(str(bench.folder / "b.jsonl"), overwrite=True)
    assert bench.texts() == ["new"]
    assert not [file for file in bench.files() if "gone" in file.name or "rejected" in file.name]


def test_a_failure_leaves_nothing(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(PromptSetWriter, "add", full)
    (problem,) = bench.problems(bench.write("a.jsonl", {"prompt": "a"}))
    assert "cannot be written: No space left on device; check the folder" in problem
    assert list(bench.prefix.parent.iterdir()) == []
