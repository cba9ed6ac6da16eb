"""Sphinx extension: maths, search in English and Chinese, and nothing from another server.

Maths becomes MathML, which browsers draw without a script. A build ends with an error where a page
would load a script, a style, a font or a picture from elsewhere: clusters without a network read
these pages too, and a reader's address is nobody's business.
"""

import re
from pathlib import Path
from typing import Any

from docutils import nodes
from latex2mathml.converter import convert
from sphinx.application import Sphinx
from sphinx.errors import ExtensionError
from sphinx.search.en import SearchEnglish

HAN = "\u3400-\u4dbf\u4e00-\u9fff"
REMOTE = re.compile(
    r"""<(?:script|img|iframe|source|object|embed)\b[^>]*\b(?:src|data)=["'](?:https?:)?//[^"']*"""
    r"""|<link\b(?![^>]*rel=["']canonical)[^>]*\bhref=["'](?:https?:)?//[^"']*"""
)
REMOTE_STYLE = re.compile(r"""@import\s+(?:url\()?["']?(?:https?:)?//|url\(["']?(?:https?:)?//""")


class SearchEnglishAndChinese(SearchEnglish):
    """Index English words by their stem and Chinese text by pairs of neighbouring characters.

    Pairs need no dictionary, and a query of two characters or more finds every place where they
    stand together. The script splits queries in the same way.
    """

    lang = "en_zh"
    js_splitter_code = f"""
var splitQuery = (query) =>
  query.split(/[^\\p{{L}}\\p{{N}}_]+/u).flatMap((word) =>
    (word.match(/[{HAN}]+|[^{HAN}]+/gu) || []).flatMap((part) =>
      !/[{HAN}]/u.test(part) || part.length < 2 ? [part]
        : Array.from({{length: part.length - 1}}, (_, i) => part.slice(i, i + 2))));
"""

    def split(self, input: str) -> list[str]:
        found = []
        for word in super().split(input):
            for part in re.findall(f"[{HAN}]+|[^{HAN}]+", word):
                chinese = len(part) > 1 and re.match(f"[{HAN}]", part)
                pairs = [part[i : i + 2] for i in range(len(part) - 1)]
                found += pairs if chinese else [part]
        return found


def visit_math(self: Any, node: nodes.math) -> None:
    """Write a formula of a line."""
    self.body.append(convert(node.astext()))
    raise nodes.SkipNode


def visit_math_block(self: Any, node: nodes.math_block) -> None:
    """Write a formula that stands alone."""
    self.body.append(f"<div class='math'>{convert(node.astext(), display='block')}</div>")
    raise nodes.SkipNode


def check_offline(app: Sphinx, error: Exception | None) -> None:
    """Raise ExtensionError where a page would load anything from another server."""
    if error is not None or app.builder.format != "html":
        return
    found = []
    for file in sorted(Path(app.outdir).rglob("*")):
        pattern = {".html": REMOTE, ".css": REMOTE_STYLE}.get(file.suffix)
        if pattern and (match := pattern.search(file.read_text(encoding="utf-8"))):
            found.append(f"{file.relative_to(app.outdir)}: {match[0][:120]}")
    if found:
        raise ExtensionError(
            "a page must load nothing from another server; keep the file in docs/: "
            + "; ".join(found)
        )


def setup(app: Sphinx) -> dict[str, bool]:
    """Register the extension."""
    app.add_html_math_renderer("mathml", (visit_math, None), (visit_math_block, None))
    app.add_search_language(SearchEnglishAndChinese)
    app.connect("build-finished", check_offline)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
