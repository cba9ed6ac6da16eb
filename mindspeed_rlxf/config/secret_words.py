"""Names and forms of secrets: what is never written down, and what `doctor --bundle` removes."""

from __future__ import annotations

import re

from mindspeed_rlxf.config.keys import known_keys

LONG = r"(?:token|secret|password|passwd|passphrase|api[_-]?key|credentials?)"
SHORT = r"(?:key|pwd|pat|auth|authorization|cookie)"
NAME = re.compile(rf"(?:.*{LONG}|(?:.*[_.\-])?{SHORT})[_\-]?\d*", re.I)
FORMS = (
    re.compile(r"-----BEGIN [A-Z ]*PRIVATE KEY-----.*?(?:-----END [A-Z ]*KEY-----|\Z)", re.S),
    re.compile(r"\b(?:hf|gh[pousr]|github_pat|glpat|npm|pypi)[_-][A-Za-z0-9_\-]{16,}"),
    re.compile(r"\b(?:sk|pk|rk|xox[abprs])-[A-Za-z0-9_\-]{12,}"),
    re.compile(r"\bA[KS]IA[0-9A-Z]{16}\b"),
    re.compile(r"\beyJ[\w\-]{8,}\.[\w\-]+\.[\w\-]*"),
    re.compile(r"\b[0-9a-f]{40}\b"),
)
SCHEME = re.compile(r"\b(Bearer|Basic|Token)\s+[A-Za-z0-9._~+/=\-]{6,}", re.I)
URL_USER = re.compile(r"(?<=://)[^/\s@\"']+@")
CONFIG_KEYS = frozenset(name for names in known_keys().values() for name in names)


def is_secret_name(name: str) -> bool:
    """`HF_TOKEN`, `api-key`, `db.password`; not keys of the configuration such as `prompt_key`."""
    bare = name.rpartition(".")[2]
    return bool(NAME.fullmatch(name)) and bare not in CONFIG_KEYS


def looks_secret(name: str, value: str) -> bool:
    """Whether a variable is kept out of files: because of its name, or of what its value has."""
    return is_secret_name(name) or any(f.search(value) for f in (*FORMS, SCHEME, URL_USER))
