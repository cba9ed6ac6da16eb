"""Escape control characters in text before it is printed to a terminal.

Escape sequences can move the cursor, change the title, or put text on the clipboard. Direction
overrides display the characters of a line in another order.
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
    """Return the text with control characters and direction overrides written like `\\u001b`.

    Newlines and tabs stay. Inside quotes, JSON and YAML read the escape as the same character.
    """
    return text if text.isascii() and text.isprintable() else text.translate(_ESCAPES)


def protect(stream: TextIO) -> None:
    """Change a text stream, such as sys.stdout, to write UTF-8 with control characters escaped.

    Streams that are not io.TextIOWrapper, such as StringIO, stay as they are.
    """
    if isinstance(stream, io.TextIOWrapper):
        stream.reconfigure(encoding=CODEC, errors="backslashreplace")


def write_raw(stream: TextIO, text: str) -> None:
    """Write and flush text with its control characters, past the escaping that `protect` set.

    For our own colours and cursor moves only, never for text of others.
    """
    stream.flush()
    buffer = getattr(stream, "buffer", None)
    if buffer is None:
        stream.write(text)
    else:
        buffer.write(text.encode("utf-8", "backslashreplace"))
        buffer.flush()


class RawStream:
    """A wrapper of a protected stream that writes control characters, for tqdm's cursor moves.

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
    """Return the codec CODEC: UTF-8 that passes text through `printable` before encoding.

    None for other names; "_" counts as "-". Python's codec registry calls it.
    """
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
