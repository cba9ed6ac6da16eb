"""Names and forms of secrets: what is never written down, and what `doctor --bundle` removes."""

from __future__ import annotations

import re

from mindspeed_rlxf.config.keys import known_keys

# No pattern here takes more than linear time.
LONG = r"(?:token|secret|password|passwd|passphrase|api[_-]?key|credentials?)"
SHORT = r"(?:key|pwd|pat|auth|authorization|cookie)"
NAME = re.compile(rf"(?:.*{LONG}|(?:.*[_.\-])?{SHORT})[_\-]?\d*", re.I)
SECRET = (
    r"(?:token|key|password|passwd|passphrase|pwd|secrets?|credentials?|creds|authorization|cookie"
    r"|pat|sas|signature|dsn|webhook|passcode)"
)
SECRET_NAME = re.compile(rf"(?:^|.*[_.\-])(?:{SECRET}|(?<=[_.\-])(?:pass|auth))$", re.I)
JOINED_NAME = re.compile(r"(?:api|access|auth|secret|private|session|client|bearer|refresh)[a-z]*"
                         r"(?:token|key|secret|password|id)$", re.I)  # fmt: skip
FORMS = (
    re.compile(
        r"-----BEGIN [A-Z ]{0,40}PRIVATE KEY-----.*?(?:-----END [A-Z ]{0,40}KEY-----|\Z)", re.S
    ),
    re.compile(
        r"(?<![A-Za-z0-9])(?:hf|gh[pousr]|github_pat|glpat|gldt|glrt|npm|pypi|dop_v1|dckr_pat"
        r"|shpat|sntrys|nvapi|ntn|secret|wandb_v1|r8|gsk|xai|lin_api|tvly|pplx|tskey"
        r")[_-][A-Za-z0-9_\-]{16,}"
    ),
    re.compile(r"(?<![A-Za-z0-9])(?:sk|pk|rk|xox[abeoprs]|xapp|whsec)[-_][A-Za-z0-9_\-]{12,}"),
    re.compile(r"(?<![A-Za-z0-9])(?:AKIA|ASIA|AKSA|ABIA|ACCA|LTAI|AKID)[0-9A-Za-z]{12,}"),
    re.compile(r"(?<![A-Za-z0-9])AIza[0-9A-Za-z_\-]{30,}"),
    re.compile(r"(?<![A-Za-z0-9])ya29\.[0-9A-Za-z_\-.]{16,}"),
    re.compile(r"(?<![A-Za-z0-9])SG\.[0-9A-Za-z_\-]{16,}\.[0-9A-Za-z_\-]{16,}"),
    re.compile(r"(?<![A-Za-z0-9])\d{8,10}:AA[0-9A-Za-z_\-]{30,}"),  # Telegram
    re.compile(r"(?<![A-Za-z0-9_\-])eyJ[\w\-]{8,}\.[\w\-]+(?:\.[\w\-]*)?"),
    re.compile(r"(?<![0-9A-Za-z])[0-9a-f]{40}(?![0-9A-Za-z])"),
)
SCHEME = re.compile(
    r"(?<!\w)(Bearer|Basic|Token|Digest|Negotiate)[ \t]{1,8}[A-Za-z0-9._~+/=\-]{6,}", re.I
)
URL_USER = re.compile(r"(?<=://)[^/\s@\"']{1,512}@")
LONGEST_NAME = 256
CONFIG_KEYS = frozenset(name for names in known_keys().values() for name in names)


def is_secret_name(name: str) -> bool:
    """`HF_TOKEN`, `api-key`, `db.password`, `my_pat`, `apiKey`; not keys of the configuration such
    as `prompt_key`."""
    bare = name.rpartition(".")[2]
    if bare in CONFIG_KEYS or len(name) > LONGEST_NAME:
        return len(name) > LONGEST_NAME
    return bool(NAME.fullmatch(name) or SECRET_NAME.match(name) or JOINED_NAME.search(bare))


def looks_secret(name: str, value: str) -> bool:
    """Whether a variable is kept out of files: because of its name, or of what its value has."""
    return is_secret_name(name) or any(f.search(value) for f in (*FORMS, SCHEME, URL_USER))
