"""Values that follow from other keys: pools and placement, response length, absolute paths."""

from __future__ import annotations

import os
from typing import Any

from mindspeed_rlxf.config.draft import Draft, Tree
from mindspeed_rlxf.config.enums import RewardKind, Role

ROLE_NAMES = {role.value for role in Role}


def place_roles(draft: Draft, sections: Tree) -> None:
    """`resource_pool` as lists of processes per node, and a pool for every role."""
    pools = {}
    for name, size in sections["resource_pool"].items():
        sizes = _node_sizes(draft, str(name), size)
        underscored = str(name).replace("-", "_")
        if sizes:
            pools[underscored if underscored in ROLE_NAMES else str(name)] = sizes
    if not pools and not any(path.startswith("resource_pool") for path in draft.broken):
        draft.reject("resource_pool", "resource_pool is required; name a pool: `main: 2`")
    given = draft.known("placement", sections["placement"], ROLE_NAMES)
    placement = {role.value: role.value for role in Role} | given
    is_rule = draft.payload["reward"].get("kind") == RewardKind.RULE.value
    if is_rule and "reward" not in given and "reward" not in pools:
        placement["reward"] = placement["actor_rollout"]
    draft.payload |= {"resource_pool": pools, "placement": placement}


def _node_sizes(draft: Draft, name: str, size: Any) -> list[int]:
    """`8` and `[8, 8]`: processes per node; an empty list is a pool that is not there."""
    sizes = size if isinstance(size, list) else [size]
    if all(type(count) is int and count > 0 for count in sizes):
        return sizes
    path = f"resource_pool.{name}"
    rule = "must be a number of devices of at least 1, or a list with one such number per node"
    draft.reject(path, f"{path}={size!r} {rule}; use 1 or [8, 8]")
    return []


def max_new_tokens(draft: Draft) -> None:
    actor, training = draft.payload[Role.ACTOR_ROLLOUT.value], draft.payload["training"]
    if actor.get("max_new_tokens") is not None:
        return
    total, prompt = training.get("seq_length"), actor.get("max_prompt_length", 512)
    actor["max_new_tokens"] = 1
    if type(total) is not int or type(prompt) is not int:
        return
    actor["max_new_tokens"] = max(total - prompt, 1)
    if total <= prompt:
        draft.reject(
            "training.seq_length",
            f"training.seq_length={total} must exceed actor_rollout.max_prompt_length={prompt}, to "
            f"leave room for a response; use {prompt + 1} or more, or a shorter prompt",
        )


def absolute_paths(payload: Tree) -> None:
    """Paths are meant from the folder the command runs in, also for workers elsewhere."""
    training, data = payload["training"], payload["data"]
    places = [(payload[role.value], "load") for role in Role]
    places += [(training, "tokenizer_name_or_path"), (training, "output_dir")]
    for section, key in [*places, (data, "train_files"), (data, "val_files")]:
        value = section.get(key)
        if isinstance(value, str):
            section[key] = _absolute(value)
        elif isinstance(value, list):
            section[key] = [_absolute(v) if isinstance(v, str) else v for v in value]


def _absolute(path: str) -> str:
    return os.path.abspath(os.path.expanduser(path))
