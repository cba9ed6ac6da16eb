"""Change keys of a valid configuration, and check the result."""

from collections.abc import Mapping
from typing import Any

from pydantic import ValidationError

from mindspeed_rlxf.config.problems import ConfigError, Problem, format_value
from mindspeed_rlxf.config.rules.between_sections import check_sections
from mindspeed_rlxf.config.schema import RunConfig

Changes = Mapping[str, Any]
"""YAML key -> value, as `critic.offload.optimizer` -> True."""


def vary(config: RunConfig, changes: Changes) -> RunConfig:
    """Return a copy of the configuration with these keys changed.

    changes: YAML key -> value; keys of a role's optimizer may lie flat in the role
    Raises ConfigError if a rule of the configuration is broken.
    """
    payload = config.model_dump()
    for path, value in changes.items():
        *parents, last = path.split(".")
        holder = payload
        for part in parents:
            holder = holder[part]
        if last not in holder:  # keys of the optimizer lie flat in a role
            holder = holder["optimizer"]
        holder[last] = value
    try:
        varied = RunConfig.model_validate(payload)
    except ValidationError as error:
        raise ConfigError(Problem("", str(error))) from error
    if problems := check_sections(varied):
        raise ConfigError(problems)
    return varied


def as_overrides(changes: Changes, nested: bool = False) -> list[str]:
    """Format changes as `key=value` arguments of a command.

    nested: keys of `actor_rollout` and `ref` get the prefix `actor_rollout_ref.`
    """
    inside = ("actor_rollout.", "ref.")
    return [
        f"{'actor_rollout_ref.' if nested and key.startswith(inside) else ''}{key}="
        f"{value if isinstance(value, str) and value.isalpha() else format_value(value)}"
        for key, value in changes.items()
    ]
