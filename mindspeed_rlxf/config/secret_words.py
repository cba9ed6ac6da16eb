"""Forms of secrets that messages of tracker packages may contain."""

from __future__ import annotations

import re

# No pattern here takes more than linear time.
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
