"""Prompts of indexed data sets: what `preprocess_data.py` wrote, or the older toolkit.

Of conversations and pairs, which hold responses too, the prompt is what stands before the last one.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from mindspeed_rlxf.config.errors import Problem, UserError
from mindspeed_rlxf.config.schema import DataConfig
from mindspeed_rlxf.config.suggest import written
from mindspeed_rlxf.data.files import FileProblems, Row, fault, look_up
from mindspeed_rlxf.data.handlers import LABELS, SEQUENCES, Output
from mindspeed_rlxf.data.indexed import AnyArray, BrokenIndex, IndexedReader
from mindspeed_rlxf.data.lengths import LengthLimit
from mindspeed_rlxf.data.prompt_encoder import IGNORED
from mindspeed_rlxf.data.prompts import (
    ENCODE_CHUNK,
    Int64Array,
    Prompt,
    data_source_of,
    ground_truth_of,
)
from mindspeed_rlxf.data.sidecar import (
    MASK,
    MOVES,
    TOKEN_IDS,
    Sidecar,
    column_files,
    data_path,
    partial_folder,
    read_sidecar,
    sidecar_path,
)
from mindspeed_rlxf.data.tokenizer import KEY, vocabulary_hash
from mindspeed_rlxf.files.plain import parse_json

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

logger = logging.getLogger(__name__)

REMEDY = "run preprocess_data.py again"
PAIR_IDS, PAIR_LABELS = SEQUENCES[Output.PAIR][:2]


@dataclass(frozen=True)
class IndexedPrompts:
    """stop_token_ids: what the data sets' templates end a response with."""

    prompts: list[Prompt] = field(default_factory=list)
    stop_token_ids: tuple[int, ...] = ()


def load_indexed_prompts(
    prefixes: Sequence[str],
    tokenizer: PreTrainedTokenizerBase,
    data: DataConfig,
    max_prompt_length: int,
) -> IndexedPrompts:
    """All prompts of the data sets, in order; no prefixes, no prompts.

    The prompts' columns are looked up by the keys of `data` as those of files are. Without a
    sidecar a column holds token ids, which are decoded. Prompts over `max_prompt_length` tokens
    follow `data.overlong_prompts`.
    Raises UserError with every problem: a data set that is not there or not whole, a tokenizer
    that is not the data set's, rows that cannot be used.
    """
    problems: list[Problem] = []
    prompts: list[Prompt] = []
    stop_ids: set[int] = set()
    for prefix in prefixes:
        try:
            data_set = _DataSet(prefix, tokenizer, data)
            prompts += data_set.prompts(len(prompts), max_prompt_length)
            stop_ids.update(data_set.sidecar.stop_token_ids if data_set.sidecar else ())
        except UserError as error:
            problems += error.problems
    if problems:
        raise UserError(problems)
    return IndexedPrompts(prompts, tuple(sorted(stop_ids)))


class _DataSet:
    """One prefix, opened: the token ids and the columns that the keys of `data` lead to."""

    def __init__(self, prefix: str, tokenizer: PreTrainedTokenizerBase, data: DataConfig) -> None:
        self._prefix, self._tokenizer, self._data = prefix, tokenizer, data
        self._token_ids = self._open_token_ids()
        self.sidecar = read_sidecar(Path(prefix))
        if self.sidecar is None:
            names = self._old_columns()
            logger.warning(
                "%s: no %s beside it, so nothing says which tokenizer and template made it; the "
                "columns are read as token ids",
                prefix,
                sidecar_path(Path(prefix)).name,
            )
        else:
            self._check_tokenizer(self.sidecar)
            self._check_special_tokens(self.sidecar)
            names = {c.name: c.file for c in self.sidecar.columns if c.encoding == "json"}
        keys = (data.ground_truth_key, data.data_source_key)
        needed = {name for key in keys for name in (key, key.split(".")[0])} & names.keys()
        self._columns = {name: self._open(names[name]) for name in sorted(needed)}
        self._largest_id = max(tokenizer.get_vocab().values())
        self._labels = self._open_labels()

    def _open_token_ids(self) -> IndexedReader:
        """Those of the better responses where there are pairs."""
        self._is_pairs = PAIR_IDS in column_files(Path(self._prefix))
        self._ids_column = PAIR_IDS if self._is_pairs else TOKEN_IDS
        return self._open(self._ids_column)

    def _open_labels(self) -> IndexedReader | None:
        """Labels beside the token ids of conversations; those of the older toolkit's show it."""
        if self._is_pairs:
            return self._open(PAIR_LABELS)
        if self.sidecar is not None:
            is_ours = any(c.encoding == "labels" for c in self.sidecar.columns)
            return self._open(LABELS) if is_ours else None
        if LABELS not in column_files(Path(self._prefix)):
            return None
        labels = self._open(LABELS)
        if len(labels[0]) == len(self._token_ids[0]) and IGNORED in labels[0]:
            return labels
        return None  # answers of their own length, beside prompts

    def _old_columns(self) -> dict[str, str]:
        """Name -> name in files, of a data set without sidecar."""
        own = (TOKEN_IDS, MASK, *SEQUENCES[Output.PAIR])
        names = [n for n in column_files(Path(self._prefix)) if n not in own]
        for name in names:
            if self._open(name).dtype == np.uint8:  # ours, and not of the older toolkit
                file = sidecar_path(Path(self._prefix)).name
                raise self._broken(f"must be whole, there is no {file}")
        return dict(zip(names, names, strict=True))

    def prompts(self, first_index: int, max_prompt_length: int) -> list[Prompt]:
        """Raises UserError with every problem, each keyed by `prefix:row`."""
        found = FileProblems(self._prefix)
        limit = LengthLimit(self._prefix, max_prompt_length, self._data.overlong_prompts)
        kept: list[tuple[Int64Array, str, str]] = []
        for number, token_ids, row in self._rows(found):
            truth, truth_problem = ground_truth_of(look_up(row, self._data.ground_truth_key))
            source, source_problem = data_source_of(
                look_up(row, self._data.data_source_key), self._data
            )
            for problem in filter(None, (truth_problem, source_problem)):
                found.add(number, problem)
            ids = limit.fit(number, token_ids, found)
            if ids is not None:
                kept.append((ids, truth, source))
        limit.report(len(self._token_ids), found)
        if problems := found.located():
            raise UserError(problems)
        texts = self._decoded([ids for ids, _, _ in kept])
        return [
            Prompt(first_index + place, text, ids, truth, source)
            for place, (text, (ids, truth, source)) in enumerate(zip(texts, kept, strict=True))
        ]

    def _rows(self, problems: FileProblems) -> Iterator[tuple[int, Int64Array, Row]]:
        """(row number from 1, token ids, columns) of the rows whose ids the tokenizer has."""
        for place in range(len(self._token_ids)):
            ids = self._prompt_ids(place)
            if self._is_vocabulary(ids):
                row = {name: self._value(name, place) for name in self._columns}
                yield place + 1, ids, row
            else:
                found = f"there are {ids.min()} to {ids.max()}"
                problems.add(
                    place + 1,
                    fault(
                        f"a token id must be from 0 to {self._largest_id}, {found}",
                        f"give the tokenizer that made the data set ({KEY})",
                    ),
                )

    def _prompt_ids(self, place: int) -> Int64Array:
        ids = self._token_ids[place].astype(np.int64)
        if self._labels is None:
            return ids
        ignored = np.flatnonzero(self._labels[place] == IGNORED)
        end = int(ignored[-1]) + 1 if len(ignored) else 0
        return ids[: min(end, len(ids))]

    def _is_vocabulary(self, ids: AnyArray) -> bool:
        return not len(ids) or bool(ids.min() >= 0 and ids.max() <= self._largest_id)

    def _value(self, name: str, place: int) -> Any:
        stored = self._columns[name][place]
        if self.sidecar is not None:
            try:
                return parse_json(stored.tobytes())
            except ValueError as error:
                raise self._broken(
                    f"column {name!r} must be JSON, {error}", row=f":{place + 1}"
                ) from error
        ids = stored.astype(np.int64)
        if not self._is_vocabulary(ids):  # -100 and the like: no text
            ids = ids[(ids >= 0) & (ids <= self._largest_id)]
        return self._tokenizer.decode(ids, skip_special_tokens=True)

    def _decoded(self, prompts: Sequence[Int64Array]) -> Iterator[str]:
        for start in range(0, len(prompts), ENCODE_CHUNK):
            chunk = [ids.tolist() for ids in prompts[start : start + ENCODE_CHUNK]]
            yield from self._tokenizer.batch_decode(chunk, clean_up_tokenization_spaces=False)

    def _open(self, column: str) -> IndexedReader:
        path = data_path(Path(self._prefix), column)
        try:
            reader = IndexedReader(path)
        except FileNotFoundError as error:
            if (partial_folder(Path(self._prefix)) / MOVES).exists():
                raise self._broken(
                    "must be in place, its writer was stopped when it was whole",
                    "run the same preprocess_data.py again, which puts it there",
                ) from error
            found = f"there is no {Path(error.filename).name}"
            raise self._broken(
                f"must be the --output-prefix of an indexed data set, {found}",
                "correct data.data_path or data.val_data_path",
            ) from error
        except (BrokenIndex, OSError) as error:
            raise self._broken(f"must be whole, {error}") from error
        rows = len(reader) if column == self._ids_column else len(self._token_ids)
        if len(reader) != rows or not rows:
            raise self._broken(f"{path.name} must have {rows or 'some'} rows, it has {len(reader)}")
        return reader

    def _broken(self, rule: str, remedy: str = REMEDY, row: str = "") -> UserError:
        return UserError(Problem(f"{self._prefix}{row}", rule, remedy=remedy, colon=True))

    def _check_tokenizer(self, sidecar: Sidecar) -> None:
        own = vocabulary_hash(self._tokenizer)
        if own != sidecar.tokenizer.sha256:
            theirs = sidecar.tokenizer
            raise self._broken(
                f"the tokenizer must be the one it was made with, {theirs.path!r} (sha256 "
                f"{theirs.sha256[:12]}), not {self._tokenizer.name_or_path!r} (sha256 {own[:12]})",
                f"correct {KEY} or run preprocess_data.py with that tokenizer",
            )

    def _check_special_tokens(self, sidecar: Sidecar) -> None:
        """The ids are there already: what texts spell is in them as the preprocessing read it."""
        key, flag = "data.allow_special_tokens", "--allow-special-tokens"
        made, wanted = sidecar.allow_special_tokens, self._data.allow_special_tokens
        if made != wanted:
            raise self._broken(
                f"must be made as {key}={written(wanted)} says, it was made "
                f"{'with' if made else 'without'} {flag}",
                f"set {key}={written(made)} or run preprocess_data.py "
                f"{'without' if made else 'with'} {flag}",
            )
