"""Reset the Megatron keys of a YAML where the command line chooses FSDP.

A YAML that itself combines FSDP with them is refused, as the two contradict each other.
"""

from collections.abc import Sequence
from typing import Any

from mindspeed_rlxf.config.enums import CONFIGURED, Role
from mindspeed_rlxf.config.keys import WITHOUT_CRITIC, WITHOUT_MODEL, keys_of
from mindspeed_rlxf.config.problems import format_value
from mindspeed_rlxf.config.raw_config import RawConfig

FSDP = "fsdp"
WITHOUT_MEGATRON: dict[str, Any] = {
    "tensor_model_parallel_size": 1,
    "pipeline_model_parallel_size": 1,
    "expert_model_parallel_size": 1,
    "sequence_parallel": False,
    "num_layers_per_virtual_pipeline_stage": None,
}
"""Key that only Megatron has -> its value with FSDP."""


def reset_megatron_keys(raw: RawConfig, overrides: Sequence[str]) -> None:
    """Reset Megatron keys of the roles whose `backend=fsdp` comes from the command line.

    A key that the command line names too keeps its value. Changes `raw`, and notes each key.

    Args:
        raw: The YAML with the overrides applied.
        overrides: `key=value` arguments of the command line.
    """
    overridden = {_key_of(override) for override in overrides}
    for role in CONFIGURED:
        name = role.value
        if not _chooses_fsdp(raw, name, overridden) or not _has_model(raw, role):
            continue
        for key, value in WITHOUT_MEGATRON.items():
            if raw.value(name, key) not in (None, value):
                _reset(raw, name, key, value, overridden)
        is_trained = "recompute" in keys_of(name)
        if is_trained and raw.value(name, "recompute") in ("elementwise", "selective"):
            _reset(raw, name, "recompute", "full", overridden)


def _key_of(override: str) -> str:
    return override.partition("=")[0].lstrip("+").replace("-", "_")


def _chooses_fsdp(raw: RawConfig, role: str, overridden: set[str]) -> bool:
    """Whether the command line gives the role FSDP; the reference follows the actor."""
    if raw.value(role, "backend") is None and role == Role.REF.value:
        role = Role.ACTOR_ROLLOUT.value
    is_named = raw.user_key(f"{role}.backend") in overridden
    return is_named and raw.value(role, "backend") == FSDP


def _has_model(raw: RawConfig, role: Role) -> bool:
    if role is Role.REWARD:
        return raw.sections["reward"].get("kind") not in WITHOUT_MODEL
    has_critic = raw.sections["training"].get("stage") not in WITHOUT_CRITIC
    return role is not Role.CRITIC or has_critic


def _reset(raw: RawConfig, role: str, key: str, value: Any, overridden: set[str]) -> None:
    written = raw.user_key(f"{role}.{key}")
    if written.replace("-", "_") in overridden:
        return
    before = format_value(raw.value(role, key))
    raw.note(
        f"set to {format_value(value)}, as the command line chooses backend={FSDP}, "
        "which has no other",
        f"{written}={before}",
    )
    raw.sections[role][key] = value
