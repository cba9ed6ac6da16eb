"""File names of an indexed prompt data set, and its description in `PREFIX_packed_meta.json`."""

import re
from pathlib import Path
from typing import Annotated, Literal, TypeAlias

from pydantic import Field, ValidationError

from mindspeed_rlxf.config.fields import Integers, Section
from mindspeed_rlxf.config.problems import Problem, UserError

TOKEN_IDS = "input_ids"
MASK = "attention_mask"
MAX_NAME = 80  # column characters in a file name, which may have 255 bytes

Encoding: TypeAlias = Literal["token_ids", "labels", "mask", "json"]


class Column(Section):
    """One indexed data set `PREFIX_packed_{file}_document`, with one sequence per row."""

    name: str
    file: Annotated[str, Field(pattern=r"^[A-Za-z0-9_-]{1,120}$")]
    dtype: Literal["int32", "uint8"]
    # int32 token ids, labels (-100 = not trained) and masks, or the value as UTF-8 JSON (null if a
    # row has none)
    encoding: Encoding


class TokenizerId(Section):
    """The data set's tokenizer: path as given by the user, and `vocabulary_hash`."""

    path: str
    sha256: str


class Sidecar(Section):
    """How a prompt data set was made, and its contents."""

    format_version: Literal[1] = 1
    handler: str
    template: str
    allow_special_tokens: bool = False  # in texts too; older versions lack the field
    stop_token_ids: Integers  # end a response in the template
    tokenizer: TokenizerId
    columns: list[Column]
    counts: dict[str, int | dict[str, int]]


def data_path(prefix: Path, column_file: str) -> Path:
    """Return a column's path without `.bin` and `.idx`."""
    return prefix.with_name(f"{prefix.name}_packed_{column_file}_document")


def sidecar_path(prefix: Path) -> Path:
    """Return the sidecar's path."""
    return prefix.with_name(f"{prefix.name}_packed_meta.json")


def rejected_path(prefix: Path) -> Path:
    """Return the path of the file with rejected rows."""
    return prefix.with_name(f"{prefix.name}_rejected.jsonl")


def column_files(prefix: Path) -> list[str]:
    """Return a data set's columns, sorted: every X with a file `{prefix}_packed_X_document.idx`."""
    if not prefix.parent.is_dir():
        return []
    start = f"{prefix.name}_packed_"
    end = "_document.idx"
    columns = []
    for file in prefix.parent.iterdir():
        if not (file.name.startswith(start) and file.name.endswith(end)):
            continue
        column = file.name[len(start) : -len(end)]
        # A column's file name never contains `_packed_`: such a file belongs to a longer prefix.
        if column and "_packed_" not in column:
            columns.append(column)
    return sorted(columns)


def file_name(column: str, taken: set[str]) -> str:
    """Return a file name for a column, differing from those `taken` even without case.

    Characters other than ASCII letters, digits and `-` become `_`; at most MAX_NAME characters.
    """
    safe = re.sub(r"[^A-Za-z0-9_-]", "_", column)[:MAX_NAME].replace("packed", "pack") or "_"
    taken_lower = {name.lower() for name in taken}
    name = safe
    number = 1
    while name.lower() in taken_lower:
        number += 1
        name = f"{safe}_{number}"
    return name


def read_sidecar(prefix: Path) -> Sidecar | None:
    """Read a sidecar; None if absent, as in the older toolkit's data sets."""
    file = sidecar_path(prefix)
    if not file.exists():
        return None
    try:
        return Sidecar.model_validate_json(file.read_bytes())
    except ValidationError as error:
        details = error.errors()[0]
        field_name = ".".join(map(str, details["loc"])) or "it"
        rule = f"{field_name} is not valid ({details['msg']})"
        raise UserError(
            Problem(f"{file}", rule, remedy="run preprocess_data.py again", colon=True)
        ) from error
