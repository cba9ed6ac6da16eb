"""The records of the zip archives that `torch.save` writes: where the bytes of each one lie.

Readers of archives differ in their choice between two directories or two records of one name, and
in their treatment of bytes outside records. Here an archive has its records one after the other
from the first byte on, then one directory that agrees with them, and its end. Everything that could
be read in two ways is refused. `zipfile` takes most of it, and is 50 times slower: a large
checkpoint has 100,000 such archives.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from mindspeed_rlxf.weights.pickle_names import Refused, shorten

ZIP = b"PK\x03\x04"
END, ZIP64_END, ZIP64_LOCATOR = 22, 56, 20  # bytes of the records that end an archive
TAIL = END + ZIP64_END + ZIP64_LOCATOR
ENTRY = struct.Struct("<4s6H3L5H2L")  # of the directory
LOCAL = struct.Struct("<4s5H3L2H")  # before the data of a record
SUMS = (struct.Struct("<4s3L"), struct.Struct("<4sL2Q"))  # after them, where the header has none
STORED, ENCRYPTED, SUMS_FOLLOW = 0, 1, 8  # a method, and bits of the flags
WIDE, WIDE_16 = 0xFFFFFFFF, 0xFFFF  # the number is in another field, in 64 bits
ZIP64_FIELD, PADDING_FIELD = 1, 0x4246  # ids of extra fields
MAX_DIRECTORY = 1 << 26  # bytes: a million records
PICKLE = "data.pkl"

Read = Callable[[int, int], bytes]
"""(offset, length) of the archive -> its bytes, fewer at its end"""


@dataclass(frozen=True)
class Record:
    """An uncompressed file in an archive. start, length: of its data, bytes; crc: CRC-32"""

    name: str
    start: int
    length: int
    crc: int


@dataclass(frozen=True)
class _Entry:
    """The directory's entry for a record."""

    spelled: bytes
    name: str
    flags: int
    method: int
    crc: int
    size: int
    offset: int


def records_of(read: Read, size: int) -> dict[str, Record]:
    """Return name -> record of an archive, by offset; names lack the top folder.

    size: of the archive, bytes
    Raises Refused when the archive is ambiguous, has a program or anything that torch does not
    write, ValueError when it is damaged.
    """
    try:
        start, length, count = _place_of_directory(read, size)
        entries = list(_read_directory(read(start, length)))
        if len(entries) != count:
            raise Refused("an archive that miscounts its records")
        _refuse_names([entry.name for entry in entries])
        return dict(_check_records(read, entries, start))
    except (struct.error, UnicodeDecodeError) as error:
        raise ValueError(f"is no file of torch.save, or is truncated ({error})") from None


def _place_of_directory(read: Read, size: int) -> tuple[int, int, int]:
    """Return offset, length (bytes) and number of entries of the archive's directory.

    Raises Refused where archive readers could find another one or it is over MAX_DIRECTORY bytes,
    ValueError when damaged.
    """
    tail = read(max(0, size - TAIL), min(size, TAIL))
    end = tail[-END:]
    if end[:4] != b"PK\x05\x06" or end[-2:] != b"\0\0":
        raise ValueError("is no file of torch.save, or is truncated (it does not end as one)")
    disk, of_directory, here, count, length, start = struct.unpack_from("<4H2L", end, 4)
    at = size - END
    locator = tail[-END - ZIP64_LOCATOR : -END]
    if locator[:4] == b"PK\x06\x07":
        wide, at = tail[:ZIP64_END], at - ZIP64_LOCATOR - ZIP64_END
        if wide[:4] != b"PK\x06\x06" or struct.unpack_from("<LQL", locator, 4) != (0, at, 1):
            raise Refused("an archive with its end in two places")
        narrow = (here, count, length, start)
        rest, _, _, disk, of_directory, *numbers = struct.unpack_from("<Q2H2L4Q", wide, 4)
        markers = (WIDE_16, WIDE_16, WIDE, WIDE)
        if rest != ZIP64_END - 12 or any(
            n not in (w, m) for n, w, m in zip(narrow, numbers, markers, strict=True)
        ):
            raise Refused("an archive with two ends that differ")
        here, count, length, start = numbers
    if start + length != at or disk or of_directory or here != count:
        raise Refused("an archive within an archive")
    if length > MAX_DIRECTORY:
        raise Refused(f"a directory of {length} bytes")
    return start, length, count


def _read_directory(data: bytes) -> Iterator[_Entry]:
    """Yield the entries of an archive's directory, in its order.

    data: bytes of the directory
    Raises Refused for encrypted, commented or compressed records, ValueError or struct.error when
    the directory is damaged.
    """
    at = 0
    while at < len(data):
        magic, _, _, flags, method, _, _, crc, packed, size, *lengths, disk, _, _, offset = (
            ENTRY.unpack_from(data, at)
        )
        name, extra, comment = lengths
        at += ENTRY.size
        spelled, field = data[at : at + name], data[at + name : at + name + extra]
        at += name + extra + comment
        if magic != b"PK\x01\x02" or at > len(data):
            raise ValueError("is no file of torch.save, or is truncated (its directory is damaged)")
        if flags & ENCRYPTED or disk or comment:
            raise Refused("an encrypted or commented record")
        size, packed, offset = _widen(field, [size, packed, offset])
        if method != STORED or packed != size:
            raise Refused("a compressed record, which torch does not write")
        yield _Entry(spelled, spelled.decode("utf-8"), flags, method, crc, size, offset)


def _extra_fields(extra: bytes) -> dict[int, bytes]:
    """Return a record's extra fields by id.

    Raises Refused for ids other than ZIP64_FIELD and PADDING_FIELD, a repeated id and a field that
    ends after `extra`, struct.error for fewer than 4 bytes at the end.
    """
    fields: dict[int, bytes] = {}
    at = 0
    while at < len(extra):
        number, length = struct.unpack_from("<2H", extra, at)
        at += 4 + length
        if number not in (ZIP64_FIELD, PADDING_FIELD) or number in fields or at > len(extra):
            raise Refused("a record with an extra field that torch does not write")
        fields[number] = extra[at - length : at]
    return fields


def _widen(extra: bytes, numbers: list[int]) -> list[int]:
    """Replace numbers equal to WIDE by the 64-bit ones of the zip64 extra field, in place.

    Raises Refused unless that field in `extra` has exactly as many. Returns `numbers`.
    """
    wide = _extra_fields(extra).get(ZIP64_FIELD, b"")
    marked = [at for at, number in enumerate(numbers) if number == WIDE]
    if len(wide) != 8 * len(marked):
        raise Refused("a record with a size in two places, or in none")
    for at, number in zip(marked, struct.unpack(f"<{len(marked)}Q", wide), strict=True):
        numbers[at] = number
    return numbers


def _refuse_names(names: list[str]) -> None:
    """Refuse archives by the names of their records.

    Raises Refused for names that differ only in case or not at all, names with a backslash or
    unprintable characters, more than one top folder, a `constants.pkl` (TorchScript), and a .pkl
    other than PICKLE.
    """
    if len({name.lower() for name in names}) != len(names):
        raise Refused("two records of one name")
    if any(not name.isprintable() or "\\" in name for name in names):
        raise Refused("a record with a name that readers cut")
    if len({name.partition("/")[0] for name in names}) > 1:
        raise Refused("an archive with two folders")
    inner = [name.partition("/")[2].lower() for name in names]
    if any(name.endswith("constants.pkl") for name in inner):
        raise Refused("a TorchScript program")
    if other := [name for name in inner if name.endswith(".pkl") and name != PICKLE]:
        raise Refused(f"a second pickle, {shorten(other[0])}")


def _check_records(read: Read, entries: list[_Entry], end: int) -> Iterator[tuple[str, Record]]:
    """Check the records of an archive; yield (name without folder, record) for each, by offset.

    end: offset of the directory
    Raises Refused, after the records before the fault, unless the records fill the archive up to
    `end` without gap or overlap, and each record's own header agrees with its entry.
    """
    at = 0
    for entry in sorted(entries, key=lambda entry: entry.offset):
        if entry.offset != at:
            raise Refused("an archive with bytes of no record, or of two")
        header = read(at, LOCAL.size)
        magic, _, flags, method, _, _, crc, packed, size, name, extra = LOCAL.unpack(header)
        start = at + LOCAL.size + name + extra
        rest = read(at + LOCAL.size, name + extra)
        if magic != ZIP or rest[:name] != entry.spelled:
            raise Refused(f"a record {shorten(entry.name)} with two names")
        fields = _extra_fields(rest[name:])
        at = start + entry.size
        if flags & SUMS_FOLLOW:
            at += _sums_length(read, entry, at)
            same = (crc, packed, size) in ((0, 0, 0), (entry.crc, entry.size, entry.size))
        else:
            wide = fields.get(ZIP64_FIELD, b"") if WIDE in (size, packed) else b""
            found = struct.unpack("<2Q", wide) if wide else (size, packed)
            same = (crc, *found) == (entry.crc, entry.size, entry.size)
        if not same or (flags, method) != (entry.flags, entry.method):
            raise Refused(f"a record {shorten(entry.name)} that is described in two ways")
        yield entry.name.partition("/")[2], Record(entry.name, start, entry.size, entry.crc)
    if at != end:
        raise Refused("an archive with bytes of no record, or of two")


def _sums_length(read: Read, entry: _Entry, at: int) -> int:
    """Return the length in bytes of the data descriptor (CRC-32 and sizes) after a record's data.

    at: its offset. Raises Refused where it differs from the entry.
    """
    for form in SUMS:
        data = read(at, form.size)
        expected = (b"PK\x07\x08", entry.crc, entry.size, entry.size)
        if len(data) == form.size and form.unpack(data) == expected:
            return form.size
    raise Refused(f"a record {shorten(entry.name)} that is described in two ways")
