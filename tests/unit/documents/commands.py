"""Find the code blocks of the documents and the commands in them.

A block that no test runs has a mark with the reason in the line before it:
`<!-- not run: needs an NPU -->`.
"""

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[3]
SHELL = ("bash", "sh")
FENCE = re.compile(r"^( *)(```|~~~)([\w{}-]*)\n(.*?)^\1\2 *$", re.MULTILINE | re.DOTALL)
MARK = re.compile(r"<!-- not run: ([^>]+?) -->\s*\Z")
SPAN = re.compile(r"(?<!`)`([^`\n]+)`(?!`)")


def documents() -> list[Path]:
    """Return the files that users read: README files, the pages of the site, and the examples'."""
    pages = [*ROOT.glob("README*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("examples/**/*.md")]
    return sorted(pages)


@dataclass(frozen=True)
class Block:
    """A fenced code block. mark: reason why no test runs its commands, None without a mark"""

    file: Path
    line: int
    language: str
    text: str
    mark: str | None

    def __str__(self) -> str:
        return f"{self.file.relative_to(ROOT)}:{self.line}"


def blocks(file: Path) -> list[Block]:
    """Return the fenced blocks of a document, in order."""
    text = file.read_text(encoding="utf-8")
    found = []
    for match in FENCE.finditer(text):
        before, body = text[: match.start()], match[4]
        mark = MARK.search(before)
        body = re.sub(rf"^{match[1]}", "", body, flags=re.MULTILINE)
        line = before.count("\n") + 1
        found.append(Block(file, line, match[3], body, mark[1] if mark else None))
    return found


def spans(file: Path) -> set[str]:
    """Return the texts between single backticks outside of code blocks."""
    return set(SPAN.findall(FENCE.sub("", file.read_text(encoding="utf-8"))))


def logical_lines(text: str) -> Iterator[str]:
    """Yield the lines of a script, with continued lines and quotations joined to one.

    Raises ValueError for a quotation that does not end.
    """
    waiting = ""
    for line in text.replace("\\\n", " ").splitlines():
        waiting = f"{waiting}\n{line}" if waiting else line
        try:
            shlex.split(waiting, comments=True)
        except ValueError:
            continue
        yield waiting
        waiting = ""
    if waiting:
        raise ValueError(f"a quotation does not end: {waiting!r}")


def commands(text: str) -> list[list[str]]:
    """Return the words of each simple command of a script, redirections left out."""
    found: list[list[str]] = []
    for line in logical_lines(text):
        lexer = shlex.shlex(
            re.sub(r"\$\([^)]*\)", "VALUE", line), posix=True, punctuation_chars=True
        )
        lexer.whitespace_split = True
        words: list[str] = []
        target = False
        for word in lexer:
            if target:
                target = False
            elif word in ("<", ">", ">>"):
                target = True
            elif re.fullmatch(r"[();|&]+", word):
                found.append(words)
                words = []
            else:
                words.append(word)
        found.append(words)
    return [words for words in found if words]
