"""A Chinese page has the headings, commands and names of its English page."""

import re
from pathlib import Path

import pytest

from docs.key_reference import MARK
from tests.unit.documents.commands import FENCE, ROOT, SHELL, blocks, commands, spans

PAIRS = [(ROOT / "README.md", ROOT / "README.zh.md")]
PAIRS += [(ROOT / "docs" / file.name, file) for file in sorted((ROOT / "docs/zh").glob("*.md"))]


def headings(file: Path) -> list[int]:
    """Return the levels of the headings that were written by hand, in order."""
    text = FENCE.sub("", file.read_text(encoding="utf-8").partition(MARK)[0])
    return [len(marks) for marks in re.findall(r"^(#+) ", text, re.MULTILINE)]


def scripts(file: Path) -> list[tuple[str | None, list[list[str]]]]:
    """Return mark and commands of each block, comments left out."""
    return [(b.mark, commands(b.text)) for b in blocks(file) if b.language in SHELL]


each_pair = pytest.mark.parametrize("pair", PAIRS, ids=lambda pair: pair[1].name)


@each_pair
def test_a_chinese_page_has_the_headings_of_the_english_one(pair: tuple[Path, Path]) -> None:
    english, chinese = map(headings, pair)
    assert chinese == english, f"compare the headings of {pair[1]} with {pair[0]}"


@each_pair
def test_a_chinese_page_has_the_commands_of_the_english_one(pair: tuple[Path, Path]) -> None:
    english, chinese = map(scripts, pair)
    assert chinese == english, f"copy the commands of {pair[0]} to {pair[1]}"


@each_pair
def test_a_chinese_page_names_nothing_else(pair: tuple[Path, Path]) -> None:
    english, chinese = map(spans, pair)
    assert chinese - english == set(), "a key or command has another name in English now"
