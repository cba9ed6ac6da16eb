"""Pages of the site: the navigation has each of them, and their links lead somewhere."""

import json
import re
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

from tests.processes import with_sources
from tests.unit.documents.commands import FENCE, ROOT, documents

DOCS = ROOT / "docs"
PAGES = sorted(DOCS.glob("**/*.md"))
LINK = re.compile(r"\]\((?!https?:)([^)\s]+)\)")


def navigation() -> list[str]:
    """Return the pages that `index.md` lists, in order."""
    text = (DOCS / "index.md").read_text(encoding="utf-8")
    lists = re.findall(r"^```\{toctree\}\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    lines = [line.strip() for each in lists for line in each.splitlines()]
    return [line for line in lines if line and not line.startswith(":")]


def test_the_navigation_has_every_page_once() -> None:
    pages = {str(page.relative_to(DOCS).with_suffix("")) for page in PAGES} - {"index"}
    listed = navigation()
    assert len(set(listed)) == len(listed) > 15
    assert pages - set(listed) == set(), "add the page to a list of docs/index.md"
    assert set(listed) - pages == set(), "docs/index.md lists a page that is not there"


@cache
def anchors(file: Path) -> set[str]:
    """Return the anchors of a page's headings, as GitHub and MyST make them."""
    text = FENCE.sub("", file.read_text(encoding="utf-8"))
    found: set[str] = set()
    for heading in re.findall(r"^#+ (.+)$", text, re.MULTILINE):
        plain = re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", heading).strip().lower()
        found.add(re.sub(r"[^\w\- ]", "", plain).replace(" ", "-"))
    return found


def test_links_lead_to_files_and_headings() -> None:
    wrong = {str(file): wrong_links(file) for file in documents()}
    assert {file: links for file, links in wrong.items() if links} == {}


def wrong_links(file: Path) -> list[str]:
    text = re.sub(r"`[^`\n]*`", "", FENCE.sub("", file.read_text(encoding="utf-8")))
    wrong = []
    for link in LINK.findall(text):
        path, _, anchor = link.partition("#")
        target = (file.parent / path).resolve() if path else file
        if not target.exists() or (anchor and anchor not in anchors(target)):
            wrong.append(link)
    return wrong


def test_the_site_is_built_and_its_search_knows_pairs_of_chinese_characters(tmp_path: Path) -> None:
    """It fails on a page that loads from elsewhere (docs/_site/offline.py)."""
    pytest.importorskip("sphinx", reason="the packages of `make docs` are not installed")
    command = [sys.executable, "-m", "sphinx", "--builder", "html", "--fail-on-warning"]
    command += ["--nitpicky", "--quiet", str(DOCS), str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, env=with_sources())
    assert done.returncode == 0, done.stderr
    text = (tmp_path / "searchindex.js").read_text(encoding="utf-8")
    index = json.loads(text.removeprefix("Search.setIndex(").removesuffix(")"))
    words = index["terms"].keys() | index["titleterms"].keys()
    assert {"checkpoint", "断点", "点续", "续训", "昇腾"} <= words
