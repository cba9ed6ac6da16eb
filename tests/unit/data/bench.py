"""Preprocess rows, and read back the files that this writes."""

import json
from pathlib import Path
from typing import Any

import pytest

from mindspeed_rlxf.config.problems import UserError
from mindspeed_rlxf.data.handlers import MapKeys
from mindspeed_rlxf.data.indexed_prompts import IndexedReader
from mindspeed_rlxf.data.preprocessing.pipeline import Counts, PreprocessOptions, preprocess
from mindspeed_rlxf.data.sidecar import Sidecar, data_path, read_sidecar
from tests.unit.data.byte_tokenizer import byte_tokenizer

KEYS = MapKeys(prompt="prompt")


def write_rows(file: Path, *rows: Any) -> str:
    """Write a jsonl file, return its path. rows: objects, or lines as str or bytes"""
    texts = [row if isinstance(row, (str, bytes)) else json.dumps(row) for row in rows]
    lines = [text.encode() if isinstance(text, str) else text for text in texts]
    file.write_bytes(b"".join(line + b"\n" for line in lines))
    return str(file)


class Bench:
    """Inputs in `folder`, outputs with the prefix `folder/out/set`."""

    def __init__(self, folder: Path, tokenizer: str) -> None:
        self.folder, self._tokenizer = folder, tokenizer
        self.prefix = folder / "out" / "set"

    def write(self, name: str, *rows: Any) -> str:
        """Write a file of the folder; see `write_rows`."""
        return write_rows(self.folder / name, *rows)

    def run(self, *inputs: str, **options: Any) -> Counts:
        """Preprocess input files. options: fields of PreprocessOptions"""
        values = {"map_keys": KEYS, "output_prefix": str(self.prefix), **options}
        return preprocess(PreprocessOptions(inputs, tokenizer_path=self._tokenizer, **values))

    def problems(self, *inputs: str, **options: Any) -> list[str]:
        """Assert that a run is refused and writes no file; return its problems as text."""
        before = self.files()
        with pytest.raises(UserError) as error:
            self.run(*inputs, **options)
        assert self.files() == before
        return list(map(str, error.value.problems))

    def files(self) -> list[Path]:
        """Return all files of the output folder."""
        return [path for path in self.prefix.parent.rglob("*") if path.is_file()]

    def sequences(self, file: str) -> list[Any]:
        """Return the arrays of an indexed data set. file: its name, such as input_ids"""
        reader = IndexedReader(data_path(self.prefix, file))
        return [reader[index] for index in range(len(reader))]

    def texts(self, file: str = "input_ids") -> list[str]:
        """Return decoded token ids or labels; ignored labels (negative) are left out."""
        rows = [[i for i in row.tolist() if i >= 0] for row in self.sequences(file)]
        return [byte_tokenizer().decode(ids) for ids in rows]

    def column(self, file: str) -> list[Any]:
        """Return the values of an indexed data set of JSON values."""
        return [json.loads(row.tobytes()) for row in self.sequences(file)]

    def rejected(self) -> list[dict[str, Any]]:
        """Return the objects of the file of rejected rows."""
        lines = Path(f"{self.prefix}_rejected.jsonl").read_text(encoding="utf-8").splitlines()
        return [json.loads(line) for line in lines]

    def sidecar(self) -> Sidecar:
        """Return the sidecar; fails the test where there is none."""
        sidecar = read_sidecar(self.prefix)
        assert sidecar is not None
        return sidecar
