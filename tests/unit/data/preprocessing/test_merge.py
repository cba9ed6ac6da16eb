"""Indexed data sets of a folder become one; anything that would lose a row is an error."""

from pathlib import Path

import pytest
from megatron.core.datasets.indexed_dataset import IndexedDataset

from mindspeed_rlxf.config.problems import UserError
from mindspeed_rlxf.data.preprocessing.writer import merge
from tests.unit.data.plain_pairs import write_pair


def problems_of(folder: Path, *keys: str, output: str = "out/all") -> list[str]:
    with pytest.raises(UserError) as error:
        merge(str(folder), keys, str(folder / output))
    assert not list((folder / "out").glob("*")) if (folder / "out").exists() else True
    return list(map(str, error.value.problems))


def test_pairs_are_joined_in_the_order_of_their_names(tmp_path: Path) -> None:
    for name, first in (("b", 7), ("a", 1)):
        write_pair(tmp_path / f"{name}_packed_input_ids_document", [[first, 2], [3]])
        write_pair(tmp_path / f"{name}_packed_labels_document", [[first], [9, 9]])
    keys = ("packed_input_ids_document", "packed_labels_document")
    sizes = merge(str(tmp_path), keys, str(tmp_path / "out" / "all"))
    assert list(sizes.values()) == [4, 4]
    merged = IndexedDataset(str(tmp_path / "out" / "all_packed_input_ids_document"))
    assert [merged[i].tolist() for i in range(len(merged))] == [[1, 2], [3], [7, 2], [3]]
    assert sorted(f.suffix for f in (tmp_path / "out").iterdir()) == [
        ".bin",
        ".bin",
        ".idx",
        ".idx",
    ]


def test_a_key_of_no_file_and_a_pair_without_its_other_half_are_named(tmp_path: Path) -> None:
    write_pair(tmp_path / "a_ids", [[1]])
    (problem,) = problems_of(tmp_path, "idz")
    assert "'idz' must be in the name of a file" in problem and "(there are a_ids)" in problem
    (tmp_path / "a_ids.bin").unlink()
    (problem,) = problems_of(tmp_path, "ids")
    assert "must be a pair, there is no a_ids.bin; complete or remove it" in problem


def test_columns_of_different_types_are_not_merged(tmp_path: Path) -> None:
    write_pair(tmp_path / "a_ids", [[1], [2]])
    write_pair(tmp_path / "b_ids", [[1]], code=1)
    (problem,) = problems_of(tmp_path, "ids")
    assert "must be of one type, they are int32 and uint8" in problem


def test_an_own_output_is_no_input_of_the_next_merge(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to("real")
    monkeypatch.chdir(tmp_path / "real")
    write_pair(Path("a_ids"), [[1]])
    for folder, prefix in ((".", "all/"), (".", "all/"), ("../link", "all"), ("..//real", "all")):
        assert merge(folder, ["ids"], prefix, overwrite=True) == {"all_ids": 1}
    with pytest.raises(UserError, match="must end with the beginning of a file's name"):
        merge(".", ["ids"], ".")
