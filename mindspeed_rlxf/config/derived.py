"""Set values that follow from other keys: defaults, placement, response length, absolute paths.

They are written into the payload of a `Draft`; mistakes become problems of the draft.
"""

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
from mindspeed_rlxf.config.suggest import format_value, multiples_around, use

MAX_DEVICES = 100_000
SETTINGS = tuple(PoolSettings.model_fields)
"""Keys of `resource_pool` that name no pool."""
ROLE_NAMES = {role.value for role in CONFIGURED}
PATHS = {
    "actor_rollout": ("load", "save", "fixed_responses"),
    "ref": ("load",),
    "critic": ("load", "save"),
    "reward": ("load",),
    "training": ("tokenizer_name_or_path", "output_dir"),
    "data": ("train_files", "val_files", "data_path", "val_data_path"),
}
MODEL_KINDS = (RewardKind.MODEL, RewardKind.HUGGING_FACE)
GSPO_CLIP = {"clip_ratio_low": 3e-4, "clip_ratio_high": 4e-4}
"""Default clip range of GSPO (arXiv:2507.18071, 5.1), whose ratio is a mean over a response."""


def has_critic(stage: object, section: object) -> bool:
    """Return whether the run has a critic: True for stage ray_ppo, False for other known stages.

    stage:   value of `training.stage`; None = the default, ray_ppo
    section: value of `critic` in the YAML; for an unknown stage, whether it is non-empty decides
    """
    if stage in [known.value for known in Stage]:
        return stage == Stage.RAY_PPO.value
    return stage is None or bool(section)


def needs_reference(payload: Tree) -> bool:
    """Return whether the run needs the reference's log-probs.

    True in stage ray_online_dpo, whose loss reads them, and with `logging.reference_kl`. Otherwise
    False only if `kl_ctrl.kl_coef` is 0, which stays 0 also with the adaptive controller.
    """
    control = payload["algorithm"].get("kl_ctrl")
    no_penalty = isinstance(control, dict) and control.get("kl_coef") == 0
    prefers_pairs = payload["training"].get("stage") == Stage.RAY_ONLINE_DPO.value
    return prefers_pairs or not no_penalty or payload["logging"].get("reference_kl") is True


def set_stage_defaults(draft: Draft) -> None:
    """Set absent keys of `algorithm` and `actor_rollout` in the draft to defaults of the stage.

    Online DPO: only `n_samples_per_prompt`, 2. Else, in this order: the GRPO stage's estimator,
    keys of GSPO (the clip ranges only without `clip_ratio`), `advantage_whiten` and others of the
    estimator, and `kl_penalty` if the KL is in the loss. None counts as absent.
    """
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
    if traits := TRAITS.get(str(algorithm.get("adv_estimator"))):
        if not traits.whitens:
            set_default(algorithm, "advantage_whiten", AdvantageWhiten.NONE.value)
        for key, default in traits.defaults.items():
            set_default(algorithm, key, default)
    if algorithm.get("kl_in") == KlIn.LOSS.value:
        set_default(algorithm, "kl_penalty", KlPenalty.LOW_VAR_KL.value)


def place_roles(draft: Draft, sections: Tree) -> None:
    """Write `resource_pool`, `placement` and `pool_settings` into the payload.

    `resource_pool` maps pools to processes per node, `placement` roles to pools. A role without a
    placement gets the pool of its own name; a rule reward without one shares another role's pool,
    unless there is a pool `reward`. A reference whose log-probs nothing reads is not placed. A
    placement of an unknown role becomes a problem; of a critic in a stage without one it is
    rejected and ignored.
    """
    given = sections["resource_pool"]
    draft.payload["pool_settings"] = {k: given[k] for k in SETTINGS if given.get(k) is not None}
    _read_environment(draft)
    pools = _read_pools(draft, given)
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
    chosen = draft.keep_known("placement", placed, set(roles))
    placement = {role: role for role in roles} | chosen
    if not needs_reference(draft.payload):
        _leave_out_reference(draft, pools, placement)
    draft.payload |= {"resource_pool": pools, "placement": placement}
    # An unknown word is treated as a rule, so that no second problem is reported for it.
    if draft.payload["reward"].get("kind") not in (None, *MODEL_KINDS):
        _place_rule(draft, "reward" in chosen)


def _leave_out_reference(draft: Draft, pools: Tree, placement: Tree) -> None:
    """Remove the reference from `placement`, and its pool from `pools` if no other role uses it.

    Both in place. Adds a note that no reference runs, and one on the removed pool.
    """
    pool = placement.pop(Role.REF.value)
    meaning = "no reference runs (logging.reference_kl=true keeps it, for the metric critic/kl)"
    draft.note(meaning, "algorithm.kl_ctrl.kl_coef=0")
    if isinstance(pool, str) and pool in pools and pool not in placement.values():
        size = pools.pop(pool)
        draft.note("not used, as no reference runs", f"resource_pool.{pool}={format_value(size)}")


def _place_rule(draft: Draft, is_placed: bool) -> None:
    """Place a rule reward on the actor's pool, unless the YAML places it or has a pool `reward`.

    If the actor's pool is split: on that of the reference, or else of the critic, if there is one.
    Adds a note if no other role is on the reward's pool, whose devices are idle then.
    is_placed: whether the YAML's `placement` has the reward
    """
    pools, placement = draft.payload["resource_pool"], draft.payload["placement"]
    if not is_placed and "reward" not in pools:
        # Any pool will do, except a split one, which has only the actor.
        split = draft.payload[Role.ACTOR_ROLLOUT.value].get("num_gpus_for_infer") is not None
        others = [role for role in ("ref", "critic") if role in placement]
        placement["reward"] = placement[others[0] if split and others else "actor_rollout"]
    pool = placement["reward"]
    others = [name for role, name in placement.items() if role != Role.REWARD.value]
    if isinstance(pool, str) and pool in pools and pool not in others:
        draft.note(
            "no role computes on its devices, as a rule needs none (reward.kind=rule)",
            f"resource_pool.{pool}",
        )


def _read_pools(draft: Draft, section: Tree) -> dict[str, list[int]]:
    """Return the processes per node of each pool of the YAML's section `resource_pool`.

    Names of roles get underscores. Empty pools ([]) are left out, with a note unless they are named
    after a role. Rejects wrong sizes, and a section without pools (unless another of its keys is
    rejected). Keys of SETTINGS are no pools.
    """
    pools = {}
    per_node = _devices_per_node(draft)
    for name, size in section.items():
        if name in SETTINGS:
            continue
        sizes = _node_sizes(draft, f"resource_pool.{name}", size, per_node)
        underscored = str(name).replace("-", "_")
        if sizes:
            pools[underscored if underscored in ROLE_NAMES else str(name)] = sizes
        elif size == [] and underscored not in ROLE_NAMES:  # `reward: []` = the reward has none
            draft.note("no role uses it, as it has no devices", f"resource_pool.{name}=[]")
    if not pools and not any(path.startswith("resource_pool") for path in draft.broken):
        draft.reject(Problem("resource_pool", "is required", remedy="name a pool: `main: 2`"))
    return pools


def _read_environment(draft: Draft) -> None:
    """Replace the values of `resource_pool.env` in the payload by texts, secrets withheld.

    Rejects variables whose names contain VISIBLE_DEVICES, which Ray sets, and values that
    `read_variable` refuses; the latter are left out. Does nothing if `env` is no dict.
    """
    settings = draft.payload["pool_settings"]
    if not isinstance(settings.get("env"), dict):
        return
    variables: Tree = {}
    for name, value in settings["env"].items():
        if "VISIBLE_DEVICES" in str(name):
            draft.reject(
                Problem(
                    f"resource_pool.env.{name}",
                    "must not be set, because Ray hands out the devices",
                    remedy="remove it",
                )
            )
        try:
            variables[str(name)] = read_variable(str(name), value)
        except ConfigError as error:
            draft.reject(error.problems[0])
    settings["env"] = variables


def _devices_per_node(draft: Draft) -> Any:
    """Return `device.devices_per_node`, unchecked, or its default if it is absent.

    None with runtime `local`, and where the run starts a Ray cluster instead of joining one, which
    `choose_cluster` finds out.
    """
    runtime = draft.payload["runtime"]
    is_local = runtime.get("kind") == RuntimeKind.LOCAL.value
    if is_local or choose_cluster(runtime.get("address")).address is None:
        return None
    return draft.payload["device"].get("devices_per_node", DeviceConfig().devices_per_node)


def _node_sizes(draft: Draft, path: str, size: Any, per_node: Any) -> list[int]:
    """Return the processes per node for a pool's `size`, such as 8 or [8, 8].

    A list is returned unchanged. A number becomes a list of itself, or of one `per_node` per host
    if it is larger than `per_node`. A wrong size is rejected and gives []: a count not from 1 to
    MAX_DEVICES, or a number above `per_node` that is no multiple of it.
    path:     key of the size, for problems
    per_node: devices of a host; None = not known
    """
    sizes = size if isinstance(size, list) else [size]
    if not all(type(count) is int and 0 < count <= MAX_DEVICES for count in sizes):
        draft.reject(
            Problem(
                path,
                f"must be a number of devices from 1 to {MAX_DEVICES}, or a list of such per node",
                repr(size),
                "use 1 or [8, 8]",
            )
        )
        return []
    if type(size) is not int or type(per_node) is not int or not size > per_node > 0:
        return sizes
    if size % per_node:
        draft.reject(
            Problem(
                path,
                f"must fill whole hosts of {per_node} devices ({ref('device.devices_per_node')})",
                size,
                f"{use(multiples_around(size, per_node))}, or give a list with a number per host",
            )
        )
        return []
    return [per_node] * (size // per_node)


def set_max_new_tokens(draft: Draft) -> None:
    """Set an absent `max_new_tokens` to seq_length - max_prompt_length, at least 1.

    An absent `max_prompt_length` counts as its default, 512. `max_new_tokens` is 1 also where one
    of the two lengths is no integer, which a later check reports. A `seq_length` that is not above
    `max_prompt_length` is rejected. Does nothing where `max_new_tokens` is given.
    """
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
            Problem(
                "training.seq_length",
                f"must exceed {ref('actor_rollout.max_prompt_length')}={prompt}, to leave room for "
                "a response",
                total,
                f"use {prompt + 1} or more, or a shorter prompt",
            )
        )


def make_paths_absolute(payload: Tree) -> None:
    """Make the paths of PATHS absolute in place and expand `~`: workers run in other folders.

    Each text, and each text in a list; null sections, absent keys and other values stay. Every
    section of PATHS must be in `payload`.
    """
    for section, keys in PATHS.items():
        for key in keys if payload[section] is not None else ():
            value = payload[section].get(key)
            if isinstance(value, str):
                payload[section][key] = _absolute(value)
            elif isinstance(value, list):
                payload[section][key] = [_absolute(v) if isinstance(v, str) else v for v in value]


def _absolute(path: str) -> str:
    return os.path.abspath(os.path.expanduser(path))
