"""A Chinese page has the headings, commands, names and figures of its English page."""

import re
from collections import Counter
from pathlib import Path

import pytest

from docs.key_reference import MARK
from tests.unit.documents.commands import FENCE, ROOT, SHELL, blocks, commands, spans

PAIRS = [(ROOT / "README.md", ROOT / "README.zh.md")]
PAIRS += [(ROOT / "docs" / file.name, file) for file in sorted((ROOT / "docs/zh").glob("*.md"))]
ENGLISH_ONLY = "\n## Sources\n"
"""From here on the Chinese page refers to the English one."""
TARGET = re.compile(r"(?<=\])\([^)]*\)")
FIGURE = re.compile(r"(?<![\w.])\d+(?:\.\d+)*(?:e-?\d+)?(?! 月)")


def headings(file: Path) -> list[int]:
    """Return the levels of the headings that were written by hand, in order."""
    text = FENCE.sub("", file.read_text(encoding="utf-8").partition(MARK)[0])
    return [len(marks) for marks in re.findall(r"^(#+) ", text, re.MULTILINE)]


def prose(file: Path) -> str:
    """Return what was written by hand, without blocks and the targets of links."""
    text = FENCE.sub("", file.read_text(encoding="utf-8").partition(MARK)[0])
    return TARGET.sub("", text)


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


@each_pair
def test_a_chinese_page_has_the_figures_of_the_english_one(pair: tuple[Path, Path]) -> None:
    english, chinese = map(prose, pair)
    expected = Counter(FIGURE.findall(english.partition(ENGLISH_ONLY)[0]))
    found = Counter(FIGURE.findall(chinese))
    assert found - expected == Counter(), "write the figures as the English page does"
    assert expected - found == Counter(), "figures of the English page are left out"
