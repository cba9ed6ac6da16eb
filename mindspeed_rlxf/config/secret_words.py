"""Recognise secrets by name and by form, and replace them by placeholders in the configuration."""

from __future__ import annotations

import os
import re
from typing import Any

from omegaconf import DictConfig, OmegaConf

from mindspeed_rlxf.config.errors import ConfigError, Problem
from mindspeed_rlxf.config.keys import known_keys
from mindspeed_rlxf.config.withheld import MASK, Withheld

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
CONFIG_KEYS = frozenset().union(*known_keys().values())

KEY = "resource_pool.env"
BY_NAME = re.compile(r"\$\{oc\.env:[A-Za-z_]\w*(?:,\s*(?:null|''|\"\")?\s*)?\}")
"""An interpolation of a variable without a default value, which shows no secret."""
ELSEWHERE = "${*}"
"""Placeholder for the text of a variable whose whole section is one interpolation."""


def is_secret_name(name: str) -> bool:
    """Return whether a name sounds like a secret: `HF_TOKEN`, `api-key`, `db.password`, `apiKey`.

    False for a name whose part after the last dot is a key of the configuration, as `prompt_key`.
    True for every name of more than LONGEST_NAME characters.
    """
    if len(name) > LONGEST_NAME:
        return True
    bare = name.rpartition(".")[2]
    matches = NAME.fullmatch(name) or SECRET_NAME.match(name) or JOINED_NAME.search(bare)
    return bool(matches) and bare not in CONFIG_KEYS


def looks_secret(name: str, value: str) -> bool:
    """Return whether a variable's name sounds secret or its value contains a form of secret."""
    return is_secret_name(name) or any(f.search(value) for f in (*FORMS, SCHEME, URL_USER))


def read_variable(name: str, value: Any) -> Any:
    """Return a value of `resource_pool.env` as text, or as `Withheld` if name or value is a secret.

    A number becomes text; `***` becomes the environment variable `name` of this process, as
    `Withheld`. A `Withheld` stays. Other values (a list, true) are returned unchanged, and fail in
    the later check of types.
    Errors: ConfigError for `***` without such a variable, and for a value that is no text where
    `name` is that of a secret.
    """
    if isinstance(value, Withheld):
        return value
    if type(value) in (int, float):
        value = str(value)
    if value == MASK and name in os.environ:
        return Withheld(MASK, os.environ[name])
    if value == MASK:
        raise ConfigError(
            Problem(
                f"{KEY}.{name}",
                "stands for the variable of this process, which is not set",
                MASK,
                f"export {name}, or give its value",
            )
        )
    if isinstance(value, str):
        return withhold(name, value)
    if is_secret_name(name):  # the error about the type would show the value
        raise ConfigError(Problem(f"{KEY}.{name}", "must be text", remedy="put it in quotes"))
    return value


def withhold(name: str, value: str) -> str:
    """Return `Withheld(value)`, shown as `***`, if the name or the value looks like a secret.

    Otherwise, and if it is `Withheld` already, return the value unchanged.
    """
    if isinstance(value, Withheld) or not looks_secret(name, value):
        return value
    return Withheld(MASK, value)


def mask_secret(name: str, shown: Any) -> Any:
    """Return `***` for text that is a secret by its name or form, else `shown` unchanged.

    An interpolation without default value, such as `${oc.env:NAME}`, shows no secret and stays.
    """
    if isinstance(shown, str) and not BY_NAME.fullmatch(shown) and looks_secret(name, shown):
        return MASK
    return shown


def withhold_interpolated(tree: dict[str, Any], config: DictConfig) -> None:
    """Wrap values of `resource_pool.env` that came from interpolations as `Withheld`, in place.

    They are shown as the user wrote them, such as `${oc.env:NAME}`, or as `***` (`_as_written`),
    and never with their values. Other values stay.
    tree:   resolved configuration, changed in place
    config: the same with its interpolations
    """
    raw: Any = OmegaConf.to_container(config, resolve=False)
    for section, pool in tree.items():
        is_pool = section.replace("-", "_") == "resource_pool" and isinstance(pool, dict)
        if is_pool and isinstance(variables := pool.get("env"), dict):
            written = _written_value(raw[section], "env")
            pool["env"] = {
                name: _as_written(str(name), value, _written_value(written, name))
                for name, value in variables.items()
            }


def _written_value(written: Any, name: Any) -> Any:
    """Return the value of a key as written; ELSEWHERE if `written` itself is an interpolation."""
    return ELSEWHERE if isinstance(written, str) else written[name]


def _as_written(name: str, value: Any, written: Any) -> Any:
    """Return the value; as `Withheld`, shown as `written`, if `written` has an interpolation.

    Only text and numbers are withheld, numbers as text. Shown as `***` where `written` is ELSEWHERE
    or itself has a secret, for example as a default value.
    name:    of the key, which tells with `written` whether that has a secret
    written: the value in the YAML, before interpolation
    """
    if not isinstance(written, str) or "${" not in written:
        return value
    if isinstance(value, bool) or not isinstance(value, (str, int, float)):
        return value
    has_value = not BY_NAME.fullmatch(written) and looks_secret(name, written)
    return Withheld(MASK if has_value or written == ELSEWHERE else written, str(value))
