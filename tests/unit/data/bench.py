"""Preprocess rows in a folder, and read back what was written."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from mindspeed_rlxf.config.errors import UserError
from mindspeed_rlxf.data.indexed import IndexedReader
from mindspeed_rlxf.data.preprocessing.map_keys import MapKeys
from mindspeed_rlxf.data.preprocessing.pipeline import PreprocessOptions, preprocess
from mindspeed_rlxf.data.preprocessing.row_source import Counts
from mindspeed_rlxf.data.sidecar import Sidecar, data_path, read_sidecar
from tests.unit.data.byte_tokenizer import byte_tokenizer

KEYS = MapKeys(prompt="prompt")


class Bench:
    def __init__(self, folder: Path, tokenizer: str) -> None:
        self.folder, self._tokenizer = folder, tokenizer
        self.prefix = folder / "out" / "set"

    def write(self, name: str, *rows: Any) -> str:
        """rows: objects, or whole lines as bytes"""
        lines = [row if isinstance(row, bytes) else json.dumps(row).encode() for row in rows]
        (self.folder / name).write_bytes(b"".join(line + b"\n" for line in lines))
        return str(self.folder / name)

    def run(self, *inputs: str, **options: Any) -> Counts:
        values = {"map_keys": KEYS, "output_prefix": str(self.prefix), **options}
        return preprocess(PreprocessOptions(inputs, tokenizer_path=self._tokenizer, **values))

    def problems(self, *inputs: str, **options: Any) -> list[str]:
        """The problems of a refused run, which must leave no new file."""
        before = self.files()
        with pytest.raises(UserError) as error:
            self.run(*inputs, **options)
        assert self.files() == before
        return list(map(str, error.value.problems))

    def files(self) -> list[Path]:
        return [path for path in self.prefix.parent.rglob("*") if path.is_file()]

    def sequences(self, file: str) -> list[Any]:
        reader = IndexedReader(data_path(self.prefix, file))
        return [reader[place] for place in range(len(reader))]

    def texts(self, file: str = "input_ids") -> list[str]:
        """Decoded token ids, or labels without those that are ignored."""
        rows = [[i for i in row.tolist() if i >= 0] for row in self.sequences(file)]
        return [byte_tokenizer().decode(ids) for ids in rows]

    def column(self, file: str) -> list[Any]:
        return [json.loads(row.tobytes()) for row in self.sequences(file)]

    def rejected(self) -> list[dict[str, Any]]:
        lines = Path(f"{self.prefix}_rejected.jsonl").read_text(encoding="utf-8").splitlines()
        return [json.loads(line) for line in lines]

    def sidecar(self) -> Sidecar:
        sidecar = read_sidecar(self.prefix)
        assert sidecar is not None
        return sidecar
