"""Takes secrets, prompts and responses out of text, as far as text can tell them.

What a rule removes is marked, so that a reader sees that something stood there. Rules err on the
side of removing.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterable, Mapping

from mindspeed_rlxf.config.secret_words import FORMS, SCHEME, URL_USER, is_secret_name

GONE = "[removed]"
# `name=value`, `name: value`, `"name": "value"`, and the same with quotes that were escaped
ASSIGNMENT = re.compile(
    r"(?P<name>[\w.\-]*[A-Za-z][\w.\-]*)(?P<between>\\*[\"']?\s*[=:]\s*)"
    r"(?P<value>\\*\"[^\"\n]*\"|\\*'[^'\n]*'|[^\s,;}\])&]+)"
)
URL_QUERY = re.compile(r"(\b\w+://[^\s?#\"']+)[?#][^\s\"')]+")
NUMBERS = re.compile(r"[\[(]\s*(?:-?\d+\s*,\s*){7,}(?:-?\d+|\.\.\.)?\s*,?\s*[\])]")  # token ids
QUOTED = re.compile(r"(?P<quote>[\"'])(?P<text>(?:\\.|(?!(?P=quote))[^\n\\])*)(?P=quote)")
LONG_QUOTE = 40  # characters; longer ones with spaces are sentences, not names
TRACE_FILE = re.compile(r'^\s*File "')
# Variables whose values help and are no secret.
OPEN_VARIABLES = (
    "HCCL_", "ASCEND_", "NCCL_", "GLOO_", "TP_", "CUDA_", "TORCH_", "PYTORCH_", "OMP_", "RAY_",
    "RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_", "LC_", "LANG", "TASK_QUEUE_",
    "CPU_AFFINITY_", "CLOSE_MATMUL_", "ATB_", "LCCL_",
)  # fmt: skip
VARIABLE = re.compile(r"^[A-Z][A-Z0-9_]{2,}$")
SHORTEST = 4  # characters of a prompt or a secret that is looked for


def is_open_variable(name: str) -> bool:
    return name.startswith(OPEN_VARIABLES) and not is_secret_name(name)


class Redactor:
    """Knows the secrets of this environment and texts of the run; `clean` removes them."""

    def __init__(self, environment: Mapping[str, str], texts: Collection[str] = ()) -> None:
        """texts: prompts, responses and answers."""
        secrets = {v for k, v in environment.items() if is_secret_name(k) and len(v) >= SHORTEST}
        self._secrets = sorted(secrets, key=len, reverse=True)
        self._texts = sorted(_spellings(texts), key=len, reverse=True)

    def clean(self, text: str) -> str:
        for secret in self._secrets:
            text = text.replace(secret, GONE)
        for private in self._texts:
            if private in text:
                text = text.replace(private, GONE)
        for pattern in FORMS:
            text = pattern.sub(GONE, text)
        text = SCHEME.sub(rf"\1 {GONE}", text)
        text = URL_USER.sub(f"{GONE}@", text)
        text = URL_QUERY.sub(rf"\1?{GONE}", text)
        text = NUMBERS.sub("[numbers removed]", text)
        return "".join(self._line(line) for line in text.splitlines(keepends=True))

    @staticmethod
    def _line(line: str) -> str:
        line = ASSIGNMENT.sub(_assignment, line)
        return line if TRACE_FILE.match(line) else QUOTED.sub(_quoted, line)


def _assignment(found: re.Match[str]) -> str:
    name, value = found["name"], found["value"]
    closed = VARIABLE.match(name) and not is_open_variable(name)
    if value == GONE or not (closed or is_secret_name(name)):
        return found[0]
    return f"{name}{found['between']}{GONE}"


def _quoted(found: re.Match[str]) -> str:
    text = found["text"]
    if len(text) <= LONG_QUOTE or " " not in text:
        return found[0]
    return f"{found['quote']}[{len(text)} characters removed]{found['quote']}"


def _spellings(texts: Iterable[str]) -> set[str]:
    """Each text as it stands, line by line, and as Python and JSON would write it."""
    found = set()
    for text in texts:
        for part in (text, *text.splitlines()):
            part = part.strip()
            if len(part) >= SHORTEST:
                ascii_only = json.dumps(part)[1:-1]
                found |= {part, repr(part)[1:-1], ascii_only, json.dumps(ascii_only)[1:-1]}
                found.add(json.dumps(part, ensure_ascii=False)[1:-1])
    return found
