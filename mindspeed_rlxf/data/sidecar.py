"""What an indexed prompt data set consists of: its file names, and `PREFIX_packed_meta.json`."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, ValidationError

from mindspeed_rlxf.config.errors import Problem, UserError
from mindspeed_rlxf.config.fields import Integers, Section
from mindspeed_rlxf.files.plain import parse_json, read_text

FORMAT_VERSION = 1
TOKEN_IDS, MASK = "input_ids", "attention_mask"
MOVES = "moves"  # in the partial folder: where its files go; there once all of them are whole
MAX_NAME = 80  # of a column in a file name; file systems end at 255 bytes


class Column(Section):
    """One indexed data set `PREFIX_packed_{file}_document`; all have a sequence for every row.

    name:     the column's own name
    encoding: int32 token ids, labels (-100 = not trained on) and masks, or the UTF-8 bytes of the
              value as JSON (null where a row has none)
    """

    name: str
    file: Annotated[str, Field(pattern=r"^[A-Za-z0-9_-]{1,120}$")]
    dtype: Literal["int32", "uint8"]
    encoding: Literal["token_ids", "labels", "mask", "json"]


class TokenizerId(Section):
    """path: as it was given; sha256: of the vocabulary, see `vocabulary_hash`."""

    path: str
    sha256: str


class Sidecar(Section):
    """How a prompt data set was made and what is in it.

    allow_special_tokens: those that a row's text spells are tokens; older versions did not say
    """

    format_version: int = FORMAT_VERSION
    handler: str
    template: str
    allow_special_tokens: bool = False
    stop_token_ids: Integers
    tokenizer: TokenizerId
    columns: list[Column]
    counts: dict[str, int | dict[str, int]]

    def json_text(self) -> str:
        return json.dumps(self.model_dump(mode="json"), ensure_ascii=False, indent=1) + "\n"


def data_path(prefix: Path, column_file: str) -> Path:
    """An indexed data set without `.bin` and `.idx`."""
    return prefix.with_name(f"{prefix.name}_packed_{column_file}_document")


def sidecar_path(prefix: Path) -> Path:
    return prefix.with_name(f"{prefix.name}_packed_meta.json")


def partial_folder(prefix: Path) -> Path:
    """Where the files are while they are written."""
    return prefix.with_name(f".{prefix.name}_packed.partial")


def rejected_path(prefix: Path) -> Path:
    return prefix.with_name(f"{prefix.name}_rejected.jsonl")


def column_files(prefix: Path) -> list[str]:
    """Columns whose index exists, by the name in their files, sorted."""
    start, end = f"{prefix.name}_packed_", "_document.idx"
    names = (file.name for file in prefix.parent.iterdir()) if prefix.parent.is_dir() else ()
    columns = (n[len(start) : -len(end)] for n in names if n.startswith(start) and n.endswith(end))
    # A column's file name never holds the middle part: that one is of a longer prefix.
    return sorted(column for column in columns if column and "_packed_" not in column)


def file_name(column: str, taken: set[str]) -> str:
    """The column's name with `_` for all but ASCII letters, digits, `_` and `-`, and not taken.

    Names that differ only in case count as one, as some file systems do.
    """
    safe = re.sub(r"[^A-Za-z0-9_-]", "_", column)[:MAX_NAME].replace("packed", "pack") or "_"
    name, count = safe, 1
    while name.lower() in {t.lower() for t in taken}:
        count += 1
        name = f"{safe}_{count}"
    return name


def read_sidecar(prefix: Path) -> Sidecar | None:
    """None when there is none, as in data sets of the older toolkit; raises UserError."""
    file = sidecar_path(prefix)
    remedy = "run preprocess_data.py again"
    try:
        text = read_text(file)
        version = _version(parse_json(text))
        if version != FORMAT_VERSION:
            raise UserError(
                Problem(
                    f"{file}",
                    f"format_version must be {FORMAT_VERSION}, this one is {version!r}",
                    remedy=remedy,
                    colon=True,
                )
            )
        return Sidecar.model_validate_json(text)
    except FileNotFoundError:
        return None
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(map(str, first["loc"]))
        raise UserError(
            Problem(f"{file}", f"{place} is not valid ({first['msg']})", remedy=remedy, colon=True)
        ) from error
    except (OSError, ValueError) as error:
        if isinstance(error, UserError):
            raise
        raise UserError(
            Problem(f"{file}", f"must be a JSON object ({error})", remedy=remedy, colon=True)
        ) from error


def _version(tree: Any) -> Any:
    return tree.get("format_version") if isinstance(tree, dict) else None
