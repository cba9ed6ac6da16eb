"""Escape control characters in text before it is printed to a terminal.

Escape sequences can move the cursor, change the title, or put text on the clipboard. Direction
overrides show the characters of a line in another order.
"""

from __future__ import annotations

import codecs
import io
from typing import TextIO

CODEC = "utf-8-printable"
_CONTROLS = (
    *(number for number in range(0x20) if chr(number) not in "\n\t"),
    *range(0x7F, 0xA0),
    0x2028, 0x2029,  # ends of lines
    *range(0x202A, 0x202F), *range(0x2066, 0x206A),  # directions
)  # fmt: skip
_ESCAPES = {number: f"\\u{number:04x}" for number in _CONTROLS}


def printable(text: str) -> str:
    """Write control characters, except line ends and tabs, like `\\u001b`.

    Inside the quotes of JSON and YAML that means the same character.
    """
    return text if text.isascii() and text.isprintable() else text.translate(_ESCAPES)


def protect(stream: TextIO) -> None:
    """Make a stream encode everything as UTF-8 without control characters.

    Streams in memory stay as they are.
    """
    if isinstance(stream, io.TextIOWrapper):
        stream.reconfigure(encoding=CODEC, errors="backslashreplace")


def write_raw(stream: TextIO, text: str) -> None:
    """Write our own colours and cursor moves to a stream that `protect` has changed."""
    stream.flush()
    buffer = getattr(stream, "buffer", None)
    if buffer is None:
        stream.write(text)
    else:
        buffer.write(text.encode("utf-8", "backslashreplace"))
        buffer.flush()


class RawStream:
    """A stream for tqdm, which draws its bar with cursor moves.

    Write only numbers and names of metrics to it.
    """

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self.encoding = "utf-8"

    def write(self, text: str) -> None:
        write_raw(self._stream, text)

    def flush(self) -> None:
        self._stream.flush()

    def isatty(self) -> bool:
        return self._stream.isatty()

    def fileno(self) -> int:
        return self._stream.fileno()


class _Encoder(codecs.IncrementalEncoder):
    def encode(self, text: str, final: bool = False) -> bytes:
        return printable(text).encode("utf-8", self.errors)


def _find_codec(name: str) -> codecs.CodecInfo | None:
    """Return the codec that writes only printable characters, for Python's registry; else None."""
    if name.replace("_", "-") != CODEC:
        return None
    plain = codecs.lookup("utf-8")
    return codecs.CodecInfo(
        lambda text, errors="strict": (printable(text).encode("utf-8", errors), len(text)),
        plain.decode,
        plain.streamreader,
        plain.streamwriter,
        _Encoder,
        plain.incrementaldecoder,
        CODEC,
    )


codecs.register(_find_codec)
