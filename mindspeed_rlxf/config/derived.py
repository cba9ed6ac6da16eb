"""Values that follow from other keys: pools and placement, response length, absolute paths."""

from __future__ import annotations

import os
from typing import Any

from mindspeed_rlxf.config.cluster import choose_cluster
from mindspeed_rlxf.config.draft import Draft, Tree, set_default
from mindspeed_rlxf.config.enums import (
    CONFIGURED,
    AdvantageWhiten,
    AdvEstimator,
    KlIn,
    KlPenalty,
    LossNormalizer,
    PolicyLoss,
    RewardKind,
    Role,
    RuntimeKind,
    Stage,
)
from mindspeed_rlxf.config.errors import ConfigError, Problem, ref
from mindspeed_rlxf.config.estimators import TRAITS
from mindspeed_rlxf.config.secret_words import read_variable
from mindspeed_rlxf.config.sections import DeviceConfig, PoolSettings
from mindspeed_rlxf.config.suggest import multiples_around, use

MAX_DEVICES = 100_000
SETTINGS = tuple(PoolSettings.model_fields)
"""Keys of `resource_pool` that name no pool."""
ROLE_NAMES = {role.value for role in CONFIGURED}
GSPO_CLIP = {"clip_ratio_low": 3e-4, "clip_ratio_high": 4e-4}
"""Of arXiv:2507.18071, section 5.1: the ratio of a response is a mean over its tokens."""


def has_critic(stage: object, section: object) -> bool:
    """Of a stage that there is; of another, which is an error, whether the YAML has the section.

    stage: the word of training.stage, None = the default
    """
    if stage is None:
        return True
    return stage == Stage.RAY_PPO.value if is_stage(stage) else bool(section)


def is_stage(word: object) -> bool:
    return word in [stage.value for stage in Stage]


def stage_defaults(draft: Draft) -> None:
    """Choices that follow from the stage and the estimator where the YAML is silent."""
    stage, algorithm = draft.payload["training"].get("stage"), draft.payload["algorithm"]
    actor = draft.payload[Role.ACTOR_ROLLOUT.value]
    if stage == Stage.RAY_ONLINE_DPO.value:
        set_default(actor, "n_samples_per_prompt", 2)
        return
    if stage == Stage.RAY_GRPO.value:
        set_default(algorithm, "adv_estimator", AdvEstimator.GRPO.value)
    if actor.get("policy_loss") == PolicyLoss.GSPO.value:
        set_default(algorithm, "loss_normalizer", LossNormalizer.SEQUENCE_MEANS.value)
        if actor.get("clip_ratio") is None:
            for key, value in GSPO_CLIP.items():
                set_default(actor, key, value)
    word = algorithm.get("adv_estimator")
    if isinstance(word, str) and (traits := TRAITS.get(word)) is not None:
        if not traits.whitens:
            set_default(algorithm, "advantage_whiten", AdvantageWhiten.NONE.value)
        for key, default in traits.defaults.items():
            set_default(algorithm, key, default)
    if algorithm.get("kl_in") == KlIn.LOSS.value:
        set_default(algorithm, "kl_penalty", KlPenalty.LOW_VAR_KL.value)


def place_roles(draft: Draft, sections: Tree) -> None:
    """`resource_pool` as lists of processes per node, and a pool for every role."""
    pools = {}
    per_node = _devices_per_node(draft)
    given = sections["resource_pool"]
    draft.payload["pool_settings"] = {k: given[k] for k in SETTINGS if given.get(k) is not None}
    _environment(draft)
    for name, size in given.items():
        if name in SETTINGS:
            continue
        sizes = _node_sizes(draft, str(name), size, per_node)
        underscored = str(name).replace("-", "_")
        if sizes:
            pools[underscored if underscored in ROLE_NAMES else str(name)] = sizes
        elif size == [] and underscored not in ROLE_NAMES:  # `reward: []` says that there is none
            draft.note("no role uses it, as it has no devices", f"resource_pool.{name}=[]")
    if not pools and not any(path.startswith("resource_pool") for path in draft.broken):
        draft.reject(Problem("resource_pool", "is required", remedy="name a pool: `main: 2`"))
    roles = [role.value for role in CONFIGURED if draft.payload[role.value] is not None]
    placed = sections["placement"]
    if Role.CRITIC.value in placed and Role.CRITIC.value not in roles:
        placed = {role: pool for role, pool in placed.items() if role != Role.CRITIC.value}
        stage = draft.payload["training"]["stage"]
        draft.reject(
            Problem(
                "placement.critic",
                f"{ref('training.stage')}={stage} has no critic",
                remedy="remove it ('~placement.critic' on the command line)",
                colon=True,
            )
        )
    chosen = draft.known("placement", placed, set(roles))
    placement = {role: role for role in roles} | chosen
    is_rule = draft.payload["reward"].get("kind") == RewardKind.RULE.value
    if is_rule and "reward" not in chosen and "reward" not in pools:
        # Any pool will do, but one that is split holds the actor alone.
        split = draft.payload[Role.ACTOR_ROLLOUT.value].get("num_gpus_for_infer") is not None
        placement["reward"] = placement["ref" if split else "actor_rollout"]
    alone = placement["reward"]
    shared = [pool for role, pool in placement.items() if role != Role.REWARD.value]
    if is_rule and isinstance(alone, str) and alone in pools and alone not in shared:
        meaning = "no role computes on its devices, as a rule needs none (reward.kind=rule)"
        draft.note(meaning, f"resource_pool.{alone}")
    draft.payload |= {"resource_pool": pools, "placement": placement}


def _environment(draft: Draft) -> None:
    """Numbers are texts here; who sees which device is Ray's to say."""
    settings = draft.payload["pool_settings"]
    if not isinstance(settings.get("env"), dict):
        return
    variables: Tree = {}
    for name, value in settings["env"].items():
        try:
            variables[str(name)] = read_variable(str(name), value)
        except ConfigError as error:
            draft.reject(error.problems[0])
    settings["env"] = variables
    for name in settings["env"]:
        if "VISIBLE_DEVICES" in name:
            draft.reject(
                Problem(
                    f"resource_pool.env.{name}",
                    "must not be set, because Ray hands out the devices",
                    remedy="remove it",
                )
            )


def _devices_per_node(draft: Draft) -> Any:
    """Devices of each host of a cluster that is joined; None where everything is on this host."""
    runtime = draft.payload["runtime"]
    if runtime.get("kind") == RuntimeKind.LOCAL.value:
        return None
    if choose_cluster(runtime.get("address")).address is None:
        return None
    return draft.payload["device"].get("devices_per_node", DeviceConfig().devices_per_node)


def _node_sizes(draft: Draft, name: str, size: Any, per_node: Any) -> list[int]:
    """`8` and `[8, 8]`: processes per node; a count beyond `per_node` fills whole nodes, an empty
    list is a pool that is not there."""
    sizes = size if isinstance(size, list) else [size]
    if not all(type(count) is int and 0 < count <= MAX_DEVICES for count in sizes):
        draft.reject(
            Problem(
                f"resource_pool.{name}",
                f"must be a number of devices from 1 to {MAX_DEVICES}, or a list of such per node",
                repr(size),
                "use 1 or [8, 8]",
            )
        )
        return []
    if type(size) is int and type(per_node) is int and size > per_node > 0:
        return _whole_nodes(draft, name, size, per_node)
    return sizes


def _whole_nodes(draft: Draft, name: str, size: int, per_node: int) -> list[int]:
    if size % per_node:
        sizes = use(multiples_around(size, per_node))
        draft.reject(
            Problem(
                f"resource_pool.{name}",
                f"must fill whole hosts of {per_node} devices ({ref('device.devices_per_node')})",
                size,
                f"{sizes}, or give a list with a number per host",
            )
        )
        return []
    return [per_node] * (size // per_node)


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
        longest = f"{ref('actor_rollout.max_prompt_length')}={prompt}"
        draft.reject(
            Problem(
                "training.seq_length",
                f"must exceed {longest}, to leave room for a response",
                total,
                f"use {prompt + 1} or more, or a shorter prompt",
            )
        )


def absolute_paths(payload: Tree) -> None:
    """Paths are meant from the folder the command runs in, also for workers elsewhere."""
    training, data = payload["training"], payload["data"]
    places = [
        (payload[role.value], "load") for role in CONFIGURED if payload[role.value] is not None
    ]
    places += [
        (payload[role], "save") for role in ("actor_rollout", "critic") if payload[role] is not None
    ]
    places += [(payload[Role.ACTOR_ROLLOUT.value], "fixed_responses")]
    places += [(training, "tokenizer_name_or_path"), (training, "output_dir")]
    places += [(data, k) for k in ("train_files", "val_files", "data_path", "val_data_path")]
    for section, key in places:
        value = section.get(key)
        if isinstance(value, str):
            section[key] = _absolute(value)
        elif isinstance(value, list):
            section[key] = [_absolute(v) if isinstance(v, str) else v for v in value]


def _absolute(path: str) -> str:
    return os.path.abspath(os.path.expanduser(path))
