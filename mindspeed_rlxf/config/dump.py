"""Write the typed configuration as complete YAML, in the keys that a user writes.

Loading that YAML gives the same configuration, so the file in a run directory starts the same run.
"""

from __future__ import annotations

from typing import Any

import yaml

from mindspeed_rlxf.config.enums import CONFIGURED, RewardKind
from mindspeed_rlxf.config.keys import CLASSIFIER_KEYS, RULE_KEYS
from mindspeed_rlxf.config.schema import RewardConfig, RoleConfig, RunConfig


def to_tree(config: RunConfig) -> dict[str, Any]:
    """Return the complete configuration, defaults included, as plain values under the YAML's keys.

    Architectures are under `model.<name>`, optimizer keys directly in their role's section. The
    name of the config is left out, and `critic` where there is none. Secrets are shown
    by their placeholders.
    """
    values = config.model_dump(mode="json", exclude={"name"})
    models: dict[str, dict[str, Any]] = {}
    if config.critic is None:
        del values["critic"]
    for role in CONFIGURED:  # also those that do not run, as a reference without a KL term
        if values.get(role.value) is not None:
            values[role.value] = _role_tree(config.role(role), values[role.value], models)
    values["resource_pool"] |= values.pop("pool_settings")
    return {"model": models, **values}


def to_yaml(config: RunConfig) -> str:
    """Return the dict of `to_tree` as YAML text, in its order of keys."""
    text = yaml.safe_dump(to_tree(config), sort_keys=False, allow_unicode=True, width=100)
    return str(text)


def _role_tree(
    role: RoleConfig, values: dict[str, Any], models: dict[str, dict[str, Any]]
) -> dict[str, Any]:
    """Return the YAML section of a role, and add its architecture to `models` under `role.model`.

    values: fields of the role; `architecture` and `optimizer` are removed from it in place
    Optimizer keys go directly into the section, and so do architecture keys that differ from those
    that `models` has under this name already.
    A reward without an architecture keeps only the keys that its kind reads, and adds no model.
    """
    architecture, optimizer = values.pop("architecture"), values.pop("optimizer", {})
    if isinstance(role, RewardConfig) and architecture is None:
        of_rule = role.kind is RewardKind.RULE
        return {key: values[key] for key in (RULE_KEYS if of_rule else CLASSIFIER_KEYS)}
    shared = models.setdefault(role.model, architecture)
    own = {key: value for key, value in architecture.items() if shared[key] != value}
    return {**values, **own, **optimizer}
