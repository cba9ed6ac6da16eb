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
# No pattern here takes more than linear time: each starts where no other start could reach the
# same characters (a lookbehind), and no two repetitions next to each other share a character.
# `name=value`, `name: value`, `"name": "value"`, and the same with quotes that were escaped
ASSIGNMENT = re.compile(
    r"(?<![\w.\-])(?P<name>[\w.\-]+)(?P<between>\\{0,8}[\"']?[ \t]{0,64}[=:][ \t]{0,64})"
)
VALUE = re.compile(r"\\{0,8}\"[^\"\n]*\"|\\{0,8}'[^'\n]*'|[^\s,;}\])&]+")
USER_FLAG = re.compile(  # curl -u user:pass
    r"(?<![\w\-])(?P<flag>-[uU]|--user|--proxy-user)(?P<between>[ \t=]{0,8})"
    r"(?:\"[^\"\n:]{1,256}:[^\"\n]*\"|'[^'\n:]{1,256}:[^'\n]*'|[^\s:\"']{1,256}:\S+)"
)
FLAG = re.compile(  # --token abc
    r"(?<![\w\-])(?P<flag>--(?:[a-z]{1,20}-)?(?:password|passwd|token|key|secret))"
    r"(?P<between>[ \t]{1,8})(?:\"[^\"\n]*\"|'[^'\n]*'|[^\s\-]\S*)"
)
NETRC = re.compile(r"(?<!\w)(?P<name>login|password)[ \t]{1,8}(?P<value>[^\s;,]+)")
HEADER = re.compile(
    r"(?<![\w\-])(?P<name>(?:proxy-)?authorization|cookie|set-cookie|x-[a-z\-]{0,40}(?:token|key))"
    r"(?P<between>[\"']?[ \t]{0,8}[:=][ \t]{0,8})(?P<value>[^\n]+)",
    re.I,
)
URL_QUERY = re.compile(r"(://[^\s?#\"']{0,512})[?#][^\s\"')]+")
NUMBERS = re.compile(  # token ids
    r"[\[(][ ]?(?:-?\d{1,20}[ ]?,[ \n]{0,2}){7,}(?:-?\d{1,20}|\.\.\.)?[ ]?,?[ ]?[\])]"
)
QUOTED = re.compile(  # an escaped sign outside is passed over, so that no start lies in a text
    r"\\.|\"(?P<double>[^\"\n\\]*(?:\\.[^\"\n\\]*)*)\"|'(?P<single>[^'\n\\]*(?:\\.[^'\n\\]*)*)'"
)
MAX_LINE = 16_384  # characters of a line that is looked through; the rest of a longer one goes
LONGEST_NAME = 256
LONGEST_WORD = 1024
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
        there = {text[i : i + SHORTEST] for i in range(len(text))}
        for private in self._texts:
            if private[:SHORTEST] in there and private[-SHORTEST:] in there:
                text = text.replace(private, GONE)
        text = "".join(map(_cut, text.splitlines(keepends=True)))
        for pattern in FORMS:
            text = pattern.sub(GONE, text)
        text = HEADER.sub(rf"\g<name>\g<between>{GONE}", text)
        text = SCHEME.sub(rf"\1 {GONE}", text)
        text = URL_USER.sub(f"{GONE}@", text)
        text = URL_QUERY.sub(rf"\1?{GONE}", text)
        text = USER_FLAG.sub(rf"\g<flag>\g<between>{GONE}", text)
        text = FLAG.sub(rf"\g<flag>\g<between>{GONE}", text)
        text = NETRC.sub(rf"\g<name> {GONE}", text)
        text = NUMBERS.sub("[numbers removed]", text)
        return "".join(self._line(line) for line in text.splitlines(keepends=True))

    @staticmethod
    def _line(line: str) -> str:
        line = _without_values(line)
        return line if TRACE_FILE.match(line) else QUOTED.sub(_quoted, line)


def _cut(line: str) -> str:
    """A line that no log has is cut between two words; the rest is not looked through."""
    if len(line) <= MAX_LINE:
        return line
    end = max(line.rfind(" ", MAX_LINE - LONGEST_WORD, MAX_LINE), MAX_LINE - LONGEST_WORD)
    return f"{line[:end]} [{len(line) - end} characters removed]\n"


def _without_values(line: str) -> str:
    """The line without the values whose names say that they are secret."""
    parts, start, place = [], 0, 0
    while found := ASSIGNMENT.search(line, place):
        place = found.end()
        name = found["name"]
        closed = VARIABLE.match(name) and not is_open_variable(name)
        value = VALUE.match(line, place) if closed or is_secret_name(name) else None
        if value and not value[0].startswith(GONE[:-1]):
            parts += [line[start:place], GONE]
            start = place = value.end()
    return "".join([*parts, line[start:]])


def _quoted(found: re.Match[str]) -> str:
    text = found["double"] or found["single"] or ""
    if len(text) <= LONG_QUOTE or " " not in text:
        return found[0]
    return f"{found[0][0]}[{len(text)} characters removed]{found[0][0]}"


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
