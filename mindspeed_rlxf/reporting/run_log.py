"""The driver's log: the lines that the console prints, and the package's log records.

A command's first lines precede its run directory. `begin` keeps them until `write_to` opens the
file.
"""

import logging
import sys
from logging.handlers import MemoryHandler
from pathlib import Path
from typing import TextIO

from mindspeed_rlxf.config.problems import printable

FORMAT = "[%(asctime)s] %(levelname)s %(name)s: %(message)s"
PACKAGE = logging.getLogger("mindspeed_rlxf")
LINES = logging.getLogger("mindspeed_rlxf.console")  # what the console prints itself

_early = MemoryHandler(10_000, flushLevel=logging.CRITICAL + 1, flushOnClose=False)


class _Warnings(logging.Handler):
    """Prints the package's warnings to stderr."""

    def emit(self, record: logging.LogRecord) -> None:
        print(f"warning: {printable(record.getMessage())}", file=sys.stderr, flush=True)


_warnings = _Warnings(logging.WARNING)


def begin() -> None:
    """Keep log records from INFO on for `write_to`, and print warnings until then."""
    _early.buffer.clear()
    PACKAGE.setLevel(logging.INFO)
    PACKAGE.addHandler(_early)
    PACKAGE.addHandler(_warnings)


def write_to(file: Path) -> None:
    """Append log records from INFO on, those kept since `begin` first.

    The file is written until the process ends, or until there is another one.
    """
    for old in [h for h in PACKAGE.handlers if isinstance(h, logging.FileHandler)]:
        PACKAGE.removeHandler(old)
        old.close()
    handler = logging.FileHandler(file, encoding="utf-8")
    handler.setFormatter(logging.Formatter(FORMAT))
    for record in _early.buffer:
        handler.handle(record)
    _early.buffer.clear()
    PACKAGE.removeHandler(_early)
    PACKAGE.removeHandler(_warnings)
    PACKAGE.addHandler(handler)
    PACKAGE.setLevel(logging.INFO)


def say(text: str, stream: TextIO | None = None) -> None:
    """Print lines to the stream, None = stdout, and log them."""
    print(text, file=stream or sys.stdout, flush=True)
    LINES.info(text)
