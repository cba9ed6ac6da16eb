"""Read YAML that others may have written, with limits of size, depth and expanded aliases."""

from __future__ import annotations

import os
from typing import Any

import yaml

from mindspeed_rlxf.files.plain import MAX_DEPTH, read_text

MAX_BYTES = 2**20  # of one file; the longest of this package has 4 KB
MAX_NODES = 100_000  # of one file, with aliases expanded


def read_yaml(path: str | os.PathLike[str]) -> Any:
    """Return the plain values of a YAML file of at most MAX_BYTES.

    Errors: OSError (as in `open_plain`), UnicodeDecodeError, and what `parse_yaml` raises.
    """
    return parse_yaml(read_text(path, MAX_BYTES))


def parse_yaml(text: str) -> Any:
    """Return YAML text as the plain values of `yaml.safe_load`: dict, list, str, bool, date, ...

    Errors: yaml.YAMLError for invalid text or text beyond the limits, ValueError for a bad value.
    """
    check_yaml(text)
    return yaml.safe_load(text)


def check_yaml(text: str, name: str = "<unicode string>") -> None:
    """Raise yaml.YAMLError, with the line, if YAML text exceeds MAX_DEPTH or MAX_NODES.

    MAX_NODES counts values with aliases expanded. Text without aliases that has few brackets and no
    deep indent passes unparsed and uncounted; it nests at most 4 * MAX_DEPTH deep. Other text must
    be valid YAML too. name: of the file, for the message
    """
    if "*" not in text and text.count("[") + text.count("{") <= MAX_DEPTH and not _is_deep(text):
        return  # without aliases nothing expands, and the text cannot nest deep
    loader = _CountingLoader(text)
    loader.name = name
    try:
        loader.get_single_node()
    except RecursionError:
        raise yaml.YAMLError("it nests too deep") from None
    finally:
        loader.dispose()


def _is_deep(text: str) -> bool:
    """Return whether a line begins with more than MAX_DEPTH characters of " -?:".

    Other texts nest at most 2 * MAX_DEPTH deep in block style.
    """
    indents = (len(line) - len(line.lstrip(" -?:")) for line in text.splitlines())
    return max(indents, default=0) > MAX_DEPTH


class _CountingLoader(yaml.SafeLoader):  # type: ignore[misc]
    """A YAML loader that raises beyond MAX_DEPTH, and beyond MAX_NODES with aliases expanded."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self._depth = self._count = 0
        self._sizes: dict[int, int] = {}  # id of a node -> nodes in it, with aliases expanded

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        """Compose the next node with PyYAML, and add it to the counts.

        Errors: yaml.YAMLError where it exceeds a limit, or an alias is inside its own anchor.
        """
        mark, before = self.peek_event().start_mark, self._count
        is_alias = self.check_event(yaml.AliasEvent)
        self._depth += 1
        if self._depth > MAX_DEPTH:
            raise self._error(f"it nests more than {MAX_DEPTH} deep", mark)
        node = super().compose_node(parent, index)
        self._depth -= 1
        if is_alias and id(node) not in self._sizes:
            raise self._error("an alias must not be inside what it stands for", mark)
        self._count += self._sizes[id(node)] if is_alias else 1
        if self._count > MAX_NODES:
            raise self._error(f"its aliases unfold to more than {MAX_NODES} values", mark)
        self._sizes.setdefault(id(node), self._count - before)
        return node

    @staticmethod
    def _error(rule: str, mark: Any) -> yaml.YAMLError:
        return yaml.constructor.ConstructorError(None, None, rule, mark)
