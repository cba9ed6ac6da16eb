"""Remove secrets, prompts and responses from text, as far as rules can recognize them.

A mark replaces what is removed. In doubt, the rules remove.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterable, Mapping

from mindspeed_rlxf.config.secret_words import FORMS, SCHEME, URL_USER, is_secret_name

GONE = "[removed]"
# Every pattern takes linear time: each starts where no other start could reach the same characters
# (a lookbehind), and no two repetitions next to each other share a character.
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
MARKS = (  # in this order: pattern, and its replacement
    *((form, GONE) for form in FORMS),
    (HEADER, rf"\g<name>\g<between>{GONE}"),
    (SCHEME, rf"\1 {GONE}"),
    (URL_USER, f"{GONE}@"),
    (URL_QUERY, rf"\1?{GONE}"),
    (USER_FLAG, rf"\g<flag>\g<between>{GONE}"),
    (FLAG, rf"\g<flag>\g<between>{GONE}"),
    (NETRC, rf"\g<name> {GONE}"),
    (NUMBERS, "[numbers removed]"),
)
QUOTED = re.compile(  # an escaped sign outside is skipped, so that no match starts inside a text
    r"\\.|\"(?P<double>[^\"\n\\]*(?:\\.[^\"\n\\]*)*)\"|'(?P<single>[^'\n\\]*(?:\\.[^'\n\\]*)*)'"
)
MAX_LINE = 16_384  # characters; the rest of a longer line is removed
LONGEST_WORD = 1024
LONG_QUOTE = 40  # characters; longer ones with spaces are sentences, not names
TRACE_FILE = re.compile(r'^\s*File "')
# Variables whose values help a diagnosis and are no secret.
OPEN_VARIABLES = (
    "HCCL_", "ASCEND_", "NCCL_", "GLOO_", "TP_", "CUDA_", "TORCH_", "PYTORCH_", "OMP_", "RAY_",
    "RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_", "LC_", "LANG", "TASK_QUEUE_",
    "CPU_AFFINITY_", "CLOSE_MATMUL_", "ATB_", "LCCL_",
)  # fmt: skip
VARIABLE = re.compile(r"^[A-Z][A-Z0-9_]{2,}$")
SHORTEST = 4  # characters of a prompt or a secret that is looked for


def is_open_variable(name: str) -> bool:
    """Return whether a variable's value may be shown, by its name.

    It must begin with one of OPEN_VARIABLES, and must not be that of a secret.
    """
    return name.startswith(OPEN_VARIABLES) and not is_secret_name(name)


class Redactor:
    """Removes the secrets of an environment and the private texts of a run."""

    def __init__(self, environment: Mapping[str, str], texts: Collection[str] = ()) -> None:
        """Keep the values of secret variables and the texts to remove, in their spellings.

        environment: variable -> value; texts: prompts, responses and answers
        Values, and lines of texts, that are shorter than SHORTEST characters are ignored.
        """
        secrets = {v for k, v in environment.items() if is_secret_name(k) and len(v) >= SHORTEST}
        self._secrets = sorted(secrets | _spellings(secrets), key=len, reverse=True)
        self._texts = sorted(_spellings(texts), key=len, reverse=True)

    def clean(self, text: str) -> str:
        """Return the text with secrets, private texts, long quotes and lists of numbers removed.

        Known secrets and texts go by their value, others by patterns; lines over MAX_LINE are cut.
        """
        for secret in self._secrets:
            text = text.replace(secret, GONE)
        parts = {text[i : i + SHORTEST] for i in range(len(text))}
        for private in self._texts:
            if private[:SHORTEST] in parts and private[-SHORTEST:] in parts:
                text = text.replace(private, GONE)
        text = "".join(map(_cut_long_line, text.splitlines(keepends=True)))
        for pattern, mark in MARKS:
            text = pattern.sub(mark, text)
        return "".join(map(_clean_line, text.splitlines(keepends=True)))


def _clean_line(line: str) -> str:
    line = _without_values(line)
    return line if TRACE_FILE.match(line) else QUOTED.sub(_shorten_quote, line)


def _cut_long_line(line: str) -> str:
    """Cut a line over MAX_LINE characters, and say how many were removed; return others unchanged.

    It is cut at the last space in the LONGEST_WORD characters before MAX_LINE, or without a space
    there at their start.
    """
    if len(line) <= MAX_LINE:
        return line
    end = max(line.rfind(" ", MAX_LINE - LONGEST_WORD, MAX_LINE), MAX_LINE - LONGEST_WORD)
    return f"{line[:end]} [{len(line) - end} characters removed]\n"


def _without_values(line: str) -> str:
    """Return the line with GONE in place of secret values of `NAME=value` and `name: value`.

    Secret are values of names of secrets, and of variables that OPEN_VARIABLES does not cover.
    """
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


def _shorten_quote(found: re.Match[str]) -> str:
    """Return a quote of over LONG_QUOTE characters with a space as `"[n characters removed]"`.

    Other quotes are returned as they are; the kind of quotation mark stays. found: a match of
    QUOTED
    """
    text = found["double"] or found["single"] or ""
    if len(text) <= LONG_QUOTE or " " not in text:
        return found[0]
    return f"{found[0][0]}[{len(text)} characters removed]{found[0][0]}"


def _spellings(texts: Iterable[str]) -> set[str]:
    """Return each text and each of its lines, plain and as Python and JSON would escape them.

    White space around a text or line is removed; those under SHORTEST characters are left out.
    """
    found = set()
    for text in texts:
        for part in (text, *text.splitlines()):
            part = part.strip()
            if len(part) >= SHORTEST:
                ascii_only = json.dumps(part)[1:-1]
                found |= {part, repr(part)[1:-1], ascii_only, json.dumps(ascii_only)[1:-1]}
                found.add(json.dumps(part, ensure_ascii=False)[1:-1])
    return found
