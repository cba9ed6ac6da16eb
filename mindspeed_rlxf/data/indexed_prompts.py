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
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from mindspeed_rlxf.config.problems import Problem, UserError, format_value
from mindspeed_rlxf.config.schema import DataConfig
from mindspeed_rlxf.data.decoding import decode, decode_without_special
from mindspeed_rlxf.data.files import FileProblems, fault, without_nan
from mindspeed_rlxf.data.handlers import LABELS
from mindspeed_rlxf.data.prompt_store import Labels, Prompt, PromptStore
from mindspeed_rlxf.data.prompts import ENCODE_CHUNK, LengthLimit, read_labels
from mindspeed_rlxf.data.sidecar import (
    MASK,
    TOKEN_IDS,
    Sidecar,
    column_files,
    data_path,
    read_sidecar,
    sidecar_path,
)
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

        self._path, self._dtype = path, dtype
        self._builder = IndexedDatasetBuilder(f"{path}.bin", dtype=dtype)

    def add(self, items: bytes, lengths: Sequence[int]) -> None:
        """Append sequences, given as joined bytes, each as its own document."""
        import torch

        numbers = torch.from_numpy(np.frombuffer(items, self._dtype).copy())
        for sequence in torch.split(numbers, list(lengths)):
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
        least = min(self._offsets.min(initial=0), self._lengths.min(initial=0))
        most = max(self._offsets.max(initial=0), ends.max(initial=0))
        if least < 0 or most > num_bytes:
            raise BrokenIndex(f"{content} has {num_bytes} bytes, the index needs {most}")
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
PAIR_IDS, PAIR_LABELS = PAIR_COLUMNS[:2]
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
            prompts.end_part()
            stop_ids.update(data_set.sidecar.stop_token_ids if data_set.sidecar else ())
        except UserError as error:
            problems += error.problems
    if problems:
        raise UserError(problems)
    return IndexedPrompts(prompts, tuple(sorted(stop_ids)))


class _DataSet:
    """One opened data set: its token ids, and the columns named by the keys in `data`."""

    def __init__(self, prefix: str, tokenizer: PreTrainedTokenizerBase, data: DataConfig) -> None:
        self._prefix, self._tokenizer, self._data = prefix, tokenizer, data
        self._is_pairs = PAIR_IDS in column_files(Path(prefix))
        self._ids_column = PAIR_IDS if self._is_pairs else TOKEN_IDS  # the better response's
        self._token_ids = self._open(self._ids_column)
        self.sidecar = read_sidecar(Path(prefix))
        if self.sidecar is not None:
            self._check(self.sidecar)
            names = {c.name: c.file for c in self.sidecar.columns if c.encoding == "json"}
        else:
            file, own = sidecar_path(Path(prefix)).name, (TOKEN_IDS, MASK, *PAIR_COLUMNS)
            names = {name: name for name in column_files(Path(prefix)) if name not in own}
            if any(self._open(name).dtype == np.uint8 for name in names):
                raise self._error(f"must be whole, there is no {file}")
            logger.warning(
                "%s: no %s beside it, so nothing says which tokenizer and template made it; the "
                "columns are read as token ids",
                prefix,
                file,
            )
        self._columns = {name: self._open(names[name]) for name in sorted(names)}
        for key in data.extra_columns or ():
            if not {key, key.split(".")[0]} & names.keys():
                logger.warning("%s: it has no column data.extra_columns=[%s]", prefix, key)
        self._largest_id = max(tokenizer.get_vocab().values())
        self._labels = self._open_labels()

    def _open_labels(self) -> IndexedReader | None:
        """Open the labels of conversations or pairs; None if there are only prompts.

        Without a sidecar, a column `labels` counts if its first row is as long as the token ids and
        contains IGNORED; any other column `labels` holds answers.
        """
        of_sidecar = self.sidecar.columns if self.sidecar else ()
        if self._is_pairs or any(column.encoding == "labels" for column in of_sidecar):
            return self._open(PAIR_LABELS if self._is_pairs else LABELS)
        labels = None if self.sidecar else self._columns.get(LABELS)
        is_mask = labels and len(labels[0]) == len(self._token_ids[0]) and IGNORED in labels[0]
        return labels if is_mask else None

    def read_prompts(self, prompts: PromptStore, max_prompt_length: int) -> None:
        """Add the data set's prompts, with decoded text, and log how many were too long.

        Raises UserError with every row problem, keyed by `prefix:row`.
        """
        problems = FileProblems(self._prefix)
        limit = LengthLimit(self._prefix, max_prompt_length, self._data.overlong_prompts)
        rows = self._read_rows(limit, problems)
        while chunk := list(islice(rows, ENCODE_CHUNK)):
            ids = [ids for ids, _ in chunk]
            texts = [decode(self._tokenizer, token_ids) for token_ids in ids]
            for text, (token_ids, labels) in zip(texts, chunk, strict=True):
                prompts.add(text, token_ids, labels)
        limit.report(len(self._token_ids), problems)
        if located := problems.list_problems():
            raise UserError(located)

    def _read_rows(
        self, limit: LengthLimit, problems: FileProblems
    ) -> Iterator[tuple[list[int], Labels]]:
        """Yield (prompt ids, labels) for usable rows; add the others to `problems`."""
        for row_index in range(len(self._token_ids)):
            ids, number = self._token_ids[row_index].astype(np.int64), row_index + 1
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
        own = vocabulary_hash(self._tokenizer)
        if own != sidecar.tokenizer.sha256:
            theirs = sidecar.tokenizer
            raise self._error(
                f"the tokenizer must be the one it was made with, {theirs.path!r} (sha256 "
                f"{theirs.sha256[:12]}), not {self._tokenizer.name_or_path!r} (sha256 {own[:12]})",
                f"correct {KEY} or run preprocess_data.py with that tokenizer",
            )
        key, flag = "data.allow_special_tokens", "--allow-special-tokens"
        made, wanted = sidecar.allow_special_tokens, self._data.allow_special_tokens
        if made != wanted:
            raise self._error(
                f"must be made as {key}={format_value(wanted)} says, it was made "
                f"{'with' if made else 'without'} {flag}",
                f"set {key}={format_value(made)} or run preprocess_data.py "
                f"{'without' if made else 'with'} {flag}",
            )
