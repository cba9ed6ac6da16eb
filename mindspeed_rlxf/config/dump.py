"""Write the typed configuration as complete YAML, in the keys that a user writes.

Loading that YAML gives the same configuration, so the file in a run directory starts the same run.
"""

from __future__ import annotations

from typing import Any

import yaml

from mindspeed_rlxf.config.keys import RULE_KEYS
from mindspeed_rlxf.config.schema import RewardConfig, RoleConfig, RunConfig


def to_tree(config: RunConfig) -> dict[str, Any]:
    """Return plain values by YAML key: architectures per model, optimizers flat in their role."""
    values = config.model_dump(mode="json", exclude={"name"})
    models: dict[str, dict[str, Any]] = {}
    if config.critic is None:
        del values["critic"]
    for role in config.roles:
        values[role.value] = _role_tree(config.role(role), values[role.value], models)
    values["resource_pool"] |= values.pop("pool_settings")
    return {"model": models, **values}


def to_yaml(config: RunConfig) -> str:
    """Format `to_tree` as text."""
    text = yaml.safe_dump(to_tree(config), sort_keys=False, allow_unicode=True, width=100)
    return str(text)


def _role_tree(
    role: RoleConfig, values: dict[str, Any], models: dict[str, dict[str, Any]]
) -> dict[str, Any]:
    """Return the section of a role, and add its architecture to `models`.

    Architecture keys in which it differs from another role of that model stay in the section.
    """
    architecture, optimizer = values.pop("architecture"), values.pop("optimizer", {})
    if isinstance(role, RewardConfig) and architecture is None:
        return {key: values[key] for key in RULE_KEYS}
    shared = models.setdefault(role.model, architecture)
    own = {key: value for key, value in architecture.items() if shared[key] != value}
    return {**values, **own, **optimizer}
