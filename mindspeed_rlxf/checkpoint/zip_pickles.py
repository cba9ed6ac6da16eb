"""The pickles in the zip archives that `torch.save` writes, found just where torch finds them.

Readers of archives differ: in which of two directories or two records of one name they take, in
what they do with bytes before the first record. Whatever could be read in two ways is refused, so
that what is scanned is what gets loaded. `zipfile` would find them too, 50 times slower: a large
checkpoint has 100,000 such archives.
"""

from __future__ import annotations

import io
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from typing import IO

from mindspeed_rlxf.checkpoint.inert_pickle import Refused

ZIP = b"PK\x03\x04"
END, ZIP64_END, ZIP64_LOCATOR = 22, 56, 20  # bytes of the records that end an archive
TAIL = END + ZIP64_END + ZIP64_LOCATOR
ENTRY = struct.Struct("<4s6H3L5H2L")  # of the directory
LOCAL = struct.Struct("<4s5H3L2H")  # before the data of a record
STORED = 0


@dataclass(frozen=True)
class Record:
    """One entry of the directory. size, offset: bytes"""

    name: str  # lower case: torch takes a name in any case
    spelled: bytes
    method: int
    size: int
    offset: int


def pickles_of(file: IO[bytes]) -> Iterator[bytes]:
    """What torch may unpickle of the archive in `file`, from its first byte to its last.

    Errors: Refused when it could be read in two ways or holds a program; ValueError when damaged.
    """
    try:
        records = list(_directory(file))
        _refuse_ambiguous(records)
        for record in records:
            if record.name.endswith(".pkl"):
                yield _data(file, record)
    except (struct.error, UnicodeDecodeError) as error:
        raise ValueError(f"is no file of torch.save, or is truncated ({error})") from None


def _directory(file: IO[bytes]) -> Iterator[Record]:
    start, length = _place_of_directory(file)
    file.seek(start)
    data, at = file.read(length), 0
    while at < len(data):
        magic, _, _, flags, method, *_, size, name, extra, comment, _, _, _, offset = (
            ENTRY.unpack_from(data, at)
        )
        at += ENTRY.size
        spelled = data[at : at + name]
        at += name + extra + comment
        if magic != b"PK\x01\x02" or at > len(data):
            raise ValueError("is no file of torch.save, or is truncated (its directory is damaged)")
        if flags & 1:
            raise Refused("an encrypted record")
        yield Record(spelled.decode("utf-8").lower(), spelled, method, size, offset)


def _place_of_directory(file: IO[bytes]) -> tuple[int, int]:
    """Offset and length; it has to end where the records begin that end the archive."""
    size = file.seek(0, io.SEEK_END)
    file.seek(max(0, size - TAIL))
    tail = file.read()
    end = tail[-END:]
    if end[:4] != b"PK\x05\x06" or end[-2:] != b"\0\0":
        raise ValueError("is no file of torch.save, or is truncated (it does not end as one)")
    length, start, at = *struct.unpack_from("<2L", end, 12), size - END
    locator = tail[-END - ZIP64_LOCATOR : -END]
    if locator[:4] == b"PK\x06\x07":
        wide, at = tail[:ZIP64_END], at - ZIP64_LOCATOR - ZIP64_END
        if wide[:4] != b"PK\x06\x06" or struct.unpack_from("<Q", locator, 8) != (at,):
            raise Refused("an archive with its end in two places")
        length, start = struct.unpack_from("<2Q", wide, 40)
    if start + length != at:
        raise Refused("an archive within an archive")
    return start, length


def _refuse_ambiguous(records: list[Record]) -> None:
    names = [record.name for record in records]
    if len(set(names)) != len(names):
        raise Refused("two records of one name")
    if any("\0" in name or "\\" in name for name in names):
        raise Refused("a record with a name that readers cut")
    if any(name.endswith("/constants.pkl") for name in names):
        raise Refused("a TorchScript program")
    if any(r.method != STORED and r.name.endswith(".pkl") for r in records):
        raise Refused("a compressed pickle, which torch does not write")


def _data(file: IO[bytes], record: Record) -> bytes:
    file.seek(record.offset)
    magic, *_, name, extra = LOCAL.unpack(file.read(LOCAL.size))
    if magic != ZIP or file.read(name) != record.spelled:
        raise Refused(f"a record {record.name} with two names")
    file.seek(record.offset + LOCAL.size + name + extra)
    data = file.read(record.size)
    if len(data) != record.size:
        raise ValueError(f"is no file of torch.save, or is truncated ({record.name} is truncated)")
    return data
