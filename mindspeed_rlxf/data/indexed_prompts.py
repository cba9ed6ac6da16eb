"""Read and write indexed data sets, and load their prompts.

A conversation's prompt is everything before the last response, a pair's everything before the
response.
"""

from __future__ import annotations

import json
import logging
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from mindspeed_rlxf.config.problems import Problem, UserError, format_value
from mindspeed_rlxf.config.schema import DataConfig
from mindspeed_rlxf.data.decoding import decode, decode_without_special
from mindspeed_rlxf.data.files import FileProblems, fault, without_nan
from mindspeed_rlxf.data.handlers import LABELS
from mindspeed_rlxf.data.prompt_store import Labels, Prompt, PromptStore
from mindspeed_rlxf.data.prompts import LengthLimit
from mindspeed_rlxf.data.sidecar import (
    MASK,
    TOKEN_IDS,
    Sidecar,
    column_files,
    data_path,
    read_sidecar,
    sidecar_path,
)
from mindspeed_rlxf.data.text_rows import read_labels
from mindspeed_rlxf.data.tokenizer import KEY, vocabulary_hash

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


MAGIC = b"MMIDIDX\x00\x00"
HEADER = struct.Struct("<9sQBQQ")
DTYPES: dict[int, Any] = {
    1: np.uint8,
    2: np.int8,
    3: np.int16,
    4: np.int32,
    5: np.int64,
    6: np.float64,
    7: np.float32,
    8: np.uint16,
}
"""Megatron's dtype codes."""


class BrokenIndex(ValueError):
    """The files are not a complete indexed data set."""


class IndexedWriter:
    """Appends sequences to `{path}.bin` with Megatron's builder; `close` writes `{path}.idx`."""

    def __init__(self, path: Path, dtype: type[np.generic]) -> None:
        # Imported here, because Megatron takes seconds to load and readers do not need it.
        from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

        self._path = path
        self._dtype = dtype
        self._builder = IndexedDatasetBuilder(f"{path}.bin", dtype=dtype)

    def add(self, joined: bytes, lengths: Sequence[int]) -> None:
        """Append sequences, given as joined bytes, each as its own document."""
        import torch

        elements = torch.from_numpy(np.frombuffer(joined, self._dtype).copy())
        for sequence in torch.split(elements, list(lengths)):
            self._builder.add_item(sequence)
            self._builder.end_document()

    def close(self) -> None:
        """Write the index."""
        self._builder.finalize(f"{self._path}.idx")


class IndexedReader:
    """An indexed data set's sequences, memory-mapped.

    Raises BrokenIndex if a file is incomplete or malformed, OSError if unreadable.
    """

    def __init__(self, path: Path) -> None:
        index = Path(f"{path}.idx").read_bytes()
        magic, version, code, size, bounds = HEADER.unpack_from(index.ljust(HEADER.size))
        is_known = magic == MAGIC and version == 1 and code in DTYPES
        if not is_known or len(index) < HEADER.size + 12 * size + 8 * bounds:
            raise BrokenIndex(f"{path}.idx is no complete index, it starts with {index[:18]!r}")
        self.dtype: np.dtype[Any] = np.dtype(DTYPES[code])
        self._lengths = np.frombuffer(index, np.int32, size, HEADER.size)
        self._offsets = np.frombuffer(index, np.int64, size, HEADER.size + 4 * size)
        content = Path(f"{path}.bin")
        num_bytes = content.stat().st_size
        ends = self._offsets + self._lengths.astype(np.int64) * self.dtype.itemsize
        has_negative = min(self._offsets.min(initial=0), self._lengths.min(initial=0)) < 0
        needed_bytes = max(self._offsets.max(initial=0), ends.max(initial=0))
        if has_negative or needed_bytes > num_bytes:
            raise BrokenIndex(f"{content} has {num_bytes} bytes, the index needs {needed_bytes}")
        self._bytes = np.memmap(content, np.uint8, "r") if num_bytes else np.zeros(0, np.uint8)

    def __len__(self) -> int:
        return len(self._lengths)

    def __getitem__(self, row: int) -> np.ndarray[tuple[int, ...], np.dtype[Any]]:
        """Return one sequence as a read-only copy: [items] in the data set's dtype."""
        start = self._offsets[row]
        stop = start + int(self._lengths[row]) * self.dtype.itemsize
        return np.frombuffer(self._bytes[start:stop].tobytes(), self.dtype)


logger = logging.getLogger(__name__)

REMEDY = "run preprocess_data.py again"
PAIR_COLUMNS = ("chosen_input_ids", "chosen_labels", "rejected_input_ids", "rejected_labels")
PAIR_IDS = "chosen_input_ids"
PAIR_LABELS = "chosen_labels"
IGNORED = -100  # label for tokens outside the responses


@dataclass(frozen=True)
class IndexedPrompts:
    """Prompts from all data sets, and the tokens ending a response in their templates."""

    prompts: Sequence[Prompt] = ()
    stop_token_ids: tuple[int, ...] = ()


def load_indexed_prompts(
    prefixes: Sequence[str],
    tokenizer: PreTrainedTokenizerBase,
    data: DataConfig,
    max_prompt_length: int,
) -> IndexedPrompts:
    """Load all prompts, in order, and the stop token ids from the sidecars.

    `data` names the columns for ground truth, data source and so on. Without a sidecar, columns
    contain token ids and are decoded to text, with a warning. Prompts above `max_prompt_length`
    tokens follow `data.overlong_prompts`.

    Raises:
        UserError: every problem: a data set is absent, incomplete or made with another tokenizer or
            `allow_special_tokens`, or has unusable rows, whatever `data.invalid_rows` says.
    """
    if not prefixes:
        return IndexedPrompts()
    problems: list[Problem] = []
    prompts = PromptStore()
    stop_ids: set[int] = set()
    for prefix in prefixes:
        try:
            data_set = _DataSet(prefix, tokenizer, data)
            data_set.read_prompts(prompts, max_prompt_length)
            prompts.end_file()
            stop_ids.update(data_set.sidecar.stop_token_ids if data_set.sidecar else ())
        except UserError as error:
            problems += error.problems
    if problems:
        raise UserError(problems)
    return IndexedPrompts(prompts, tuple(sorted(stop_ids)))


class _DataSet:
    """One opened data set: its token ids, and the columns named by the keys in `data`."""

    def __init__(self, prefix: str, tokenizer: PreTrainedTokenizerBase, data: DataConfig) -> None:
        self._prefix = prefix
        self._tokenizer = tokenizer
        self._data = data
        self._is_pairs = PAIR_IDS in column_files(Path(prefix))
        self._ids_column = PAIR_IDS if self._is_pairs else TOKEN_IDS  # the better response's
        self._token_ids = self._open(self._ids_column)
        self.sidecar = read_sidecar(Path(prefix))
        if self.sidecar is not None:
            self._check(self.sidecar)
            json_columns = [column for column in self.sidecar.columns if column.encoding == "json"]
            file_of_column = {column.name: column.file for column in json_columns}
        else:
            file = sidecar_path(Path(prefix)).name
            of_tokens = (TOKEN_IDS, MASK, *PAIR_COLUMNS)
            names = [name for name in column_files(Path(prefix)) if name not in of_tokens]
            file_of_column = dict(zip(names, names, strict=True))
            if any(self._open(name).dtype == np.uint8 for name in names):
                raise self._error(f"must be whole, there is no {file}")
            logger.warning(
                "%s: no %s beside it, so nothing says which tokenizer and template made it; the "
                "columns are read as token ids",
                prefix,
                file,
            )
        self._columns = {name: self._open(file) for name, file in sorted(file_of_column.items())}
        for key in data.extra_columns or ():
            if not {key, key.split(".")[0]} & file_of_column.keys():
                logger.warning("%s: it has no column data.extra_columns=[%s]", prefix, key)
        self._largest_id = max(tokenizer.get_vocab().values())
        self._labels = self._open_labels()

    def _open_labels(self) -> IndexedReader | None:
        """Open the labels of conversations or pairs; None if there are only prompts.

        Without a sidecar, a column `labels` counts if its first row is as long as the token ids and
        contains IGNORED; any other column `labels` holds answers.
        """
        if self._is_pairs:
            return self._open(PAIR_LABELS)
        if self.sidecar:
            has_labels = any(column.encoding == "labels" for column in self.sidecar.columns)
            return self._open(LABELS) if has_labels else None
        labels = self._columns.get(LABELS)
        if not labels:
            return None
        has_same_length = len(labels[0]) == len(self._token_ids[0])
        return labels if has_same_length and IGNORED in labels[0] else None

    def read_prompts(self, prompts: PromptStore, max_prompt_length: int) -> None:
        """Add the data set's prompts, with decoded text, and log how many were too long.

        Raises UserError with every row problem, keyed by `prefix:row`.
        """
        problems = FileProblems(self._prefix)
        limit = LengthLimit(self._prefix, max_prompt_length, self._data.overlong_prompts)
        rows = self._read_rows(limit, problems)
        for token_ids, labels in rows:
            prompts.add(decode(self._tokenizer, token_ids), token_ids, labels)
        limit.report(len(self._token_ids), problems)
        located_problems = problems.list_problems()
        if located_problems:
            raise UserError(located_problems)

    def _read_rows(
        self, limit: LengthLimit, problems: FileProblems
    ) -> Iterator[tuple[list[int], Labels]]:
        """Yield (prompt ids, labels) for usable rows; add the others to `problems`."""
        for row_index in range(len(self._token_ids)):
            ids = self._token_ids[row_index].astype(np.int64)
            number = row_index + 1
            if self._labels is not None:
                ignored = np.flatnonzero(self._labels[row_index] == IGNORED)
                ids = ids[: ignored.max(initial=-1) + 1]
            if len(ids) and not 0 <= ids.min() <= ids.max() <= self._largest_id:
                rule = f"a token id must be from 0 to {self._largest_id}"
                rule = f"{rule}, there are {ids.min()} to {ids.max()}"
                problems.add(
                    number, fault(rule, f"give the tokenizer that made the data set ({KEY})")
                )
                continue
            row = {name: self._read_value(name, row_index) for name in self._columns}
            row = without_nan(row)
            labels = read_labels(number, row, self._data, problems)
            fitting = limit.fit(number, ids.tolist(), problems)
            if fitting is not None and labels:
                yield fitting, labels

    def _read_value(self, name: str, row_index: int) -> Any:
        """Return a column's value: parsed JSON, or, without a sidecar, decoded token ids."""
        stored = self._columns[name][row_index]
        if self.sidecar is not None:
            try:
                return json.loads(stored.tobytes())
            except ValueError as error:
                raise self._error(
                    f"column {name!r} must be JSON, {error}", row=f":{row_index + 1}"
                ) from error
        ids = stored.astype(np.int64)
        ids = ids[(ids >= 0) & (ids <= self._largest_id)]  # without -100
        return decode_without_special(self._tokenizer, ids.tolist())

    def _open(self, column: str) -> IndexedReader:
        """Open a column, which must have as many rows as the token ids."""
        path = data_path(Path(self._prefix), column)
        try:
            reader = IndexedReader(path)
        except FileNotFoundError as error:
            rule = "must be the --output-prefix of an indexed data set, there is no "
            raise self._error(
                f"{rule}{Path(error.filename).name}", "correct data.data_path or data.val_data_path"
            ) from error
        except (BrokenIndex, OSError) as error:
            raise self._error(f"must be whole, {error}") from error
        rows = len(reader) if column == self._ids_column else len(self._token_ids)
        if len(reader) != rows or not rows:
            raise self._error(f"{path.name} must have {rows or 'some'} rows, it has {len(reader)}")
        return reader

    def _error(self, rule: str, remedy: str = REMEDY, row: str = "") -> UserError:
        return UserError(Problem(f"{self._prefix}{row}", rule, remedy=remedy, colon=True))

    def _check(self, sidecar: Sidecar) -> None:
        """Raise UserError unless this run reads special tokens as the data set was made."""
        run_hash = vocabulary_hash(self._tokenizer)
        if run_hash != sidecar.tokenizer.sha256:
            maker = sidecar.tokenizer
            raise self._error(
                f"the tokenizer must be the one it was made with, {maker.path!r} (sha256 "
                f"{maker.sha256[:12]}), not {self._tokenizer.name_or_path!r} (sha256 "
                f"{run_hash[:12]})",
                f"correct {KEY} or run preprocess_data.py with that tokenizer",
            )
        key = "data.allow_special_tokens"
        flag = "--allow-special-tokens"
        was_allowed = sidecar.allow_special_tokens
        is_allowed = self._data.allow_special_tokens
        if was_allowed != is_allowed:
            raise self._error(
                f"must be made as {key}={format_value(is_allowed)} says, it was made "
                f"{'with' if was_allowed else 'without'} {flag}",
                f"set {key}={format_value(was_allowed)} or run preprocess_data.py "
                f"{'without' if was_allowed else 'with'} {flag}",
            )
