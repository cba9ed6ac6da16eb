"""Which variables of the workers are withheld, and as what they are written."""

from __future__ import annotations

import os
import re
from typing import Any

from omegaconf import DictConfig, OmegaConf

from mindspeed_rlxf.config.errors import ConfigError, Problem
from mindspeed_rlxf.config.secret_words import is_secret_name, looks_secret
from mindspeed_rlxf.config.withheld import MASK, Withheld

KEY = "resource_pool.env"
BY_NAME = re.compile(r"\$\{oc\.env:[A-Za-z_]\w*(?:,\s*(?:null|''|\"\")?\s*)?\}")
"""An interpolation that has a name and no value."""
ELSEWHERE = "${*}"


def read_variable(name: str, value: Any) -> Any:
    """A variable as the YAML gives it, as text; withheld where it looks like a secret.

    `***` is the variable of this process. Raises ConfigError where it has none of that name, and
    where a secret is no text.
    """
    if isinstance(value, Withheld):
        return value
    if type(value) in (int, float):
        value = str(value)
    if not isinstance(value, str):
        if is_secret_name(name):  # the line about the type would show it
            raise ConfigError(Problem(f"{KEY}.{name}", "must be text", remedy="put it in quotes"))
        return value
    if value != MASK:
        return withhold(name, value)
    if name not in os.environ:
        raise ConfigError(
            Problem(
                f"{KEY}.{name}",
                "is the variable of this process, which has none of that name",
                MASK,
                f"export {name}, or give its value",
            )
        )
    return Withheld(MASK, os.environ[name])


def withhold(name: str, value: str) -> str:
    """The value of a variable; withheld where its name or its form is that of a secret."""
    if isinstance(value, Withheld) or not looks_secret(name, value):
        return value
    return Withheld(MASK, value)


def masked(name: str, shown: Any) -> Any:
    """What a file has for a variable, as `withhold` would have written it."""
    if isinstance(shown, str) and not BY_NAME.fullmatch(shown) and looks_secret(name, shown):
        return MASK
    return shown


def withhold_interpolated(tree: dict[str, Any], config: DictConfig) -> None:
    """Withhold the variables of `tree` that `config` takes from elsewhere (`${oc.env:NAME}`)."""
    raw: Any = OmegaConf.to_container(config, resolve=False)
    for section, pool in tree.items():
        is_pool = section.replace("-", "_") == "resource_pool" and isinstance(pool, dict)
        if is_pool and isinstance(variables := pool.get("env"), dict):
            written = _part(raw[section], "env")
            pool["env"] = {
                n: _as_written(str(n), v, _part(written, n)) for n, v in variables.items()
            }


def _part(written: Any, name: Any) -> Any:
    """A part of what is written, `ELSEWHERE` where one interpolation stands for all of it."""
    return ELSEWHERE if isinstance(written, str) else written[name]


def _as_written(name: str, value: Any, written: Any) -> Any:
    if not isinstance(written, str) or "${" not in written or isinstance(value, (bool, type(None))):
        return value
    if not isinstance(value, (str, int, float)):
        return value
    has_value = not BY_NAME.fullmatch(written) and looks_secret(name, written)
    return Withheld(MASK if has_value or written == ELSEWHERE else written, str(value))
