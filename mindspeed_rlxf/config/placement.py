"""Place each role on a pool of processes: the sections `resource_pool` and `placement`."""

from mindspeed_rlxf.config.enums import CONFIGURED, RewardKind, Role, Stage
from mindspeed_rlxf.config.keys import ROLES, Tree, unknown_key
from mindspeed_rlxf.config.problems import Problem, format_value, multiples_around, ref, use
from mindspeed_rlxf.config.raw_config import RawConfig
from mindspeed_rlxf.config.ray_cluster import choose_cluster
from mindspeed_rlxf.config.schema import DeviceConfig, PoolSettings

MAX_DEVICES = 100_000


def place_roles(raw: RawConfig, payload: Tree) -> None:
    """Set `resource_pool`, `placement` and `pool_settings` in the payload.

    A role without a placement gets the pool with its name, else the only pool. A rule needs no
    devices and shares a pool. A reference is placed only if something reads its log-probs.
    """
    pools = _read_pools(raw, payload)
    roles = [role.value for role in CONFIGURED if payload[role.value] is not None]
    chosen = dict(raw.sections["placement"])
    for name in sorted(chosen.keys() - {*roles}):
        remedy = "remove it ('~placement.critic' on the command line)"
        absent = Problem("placement.critic", "has no place in this stage", remedy=remedy)
        unknown = unknown_key("placement", name, roles)
        raw.problems.append(absent if name == Role.CRITIC.value else unknown)
        del chosen[name]
    placement = {}
    for role in roles:
        shares_only_pool = len(pools) == 1 and role not in pools
        placement[role] = next(iter(pools)) if shares_only_pool else role
    placement |= chosen
    if trains_adapters(payload):
        placement["ref"] = chosen.get("ref", placement["actor_rollout"])
    control = payload["algorithm"].get("kl_ctrl")
    has_penalty = not (isinstance(control, dict) and control.get("kl_coef") == 0)
    is_dpo = payload["training"].get("stage") == Stage.RAY_ONLINE_DPO.value
    reads_reference = has_penalty or is_dpo or payload["logging"].get("reference_kl") is True
    if not reads_reference:
        pool = placement.pop(Role.REF.value)
        meaning = "no reference runs (logging.reference_kl=true keeps it, for the metric critic/kl)"
        raw.note(meaning, "algorithm.kl_ctrl.kl_coef=0")
        if isinstance(pool, str) and pool in pools and pool not in placement.values():
            size = format_value(pools.pop(pool))
            raw.note("not used, as no reference runs", f"resource_pool.{pool}={size}")
    section = raw.sections["resource_pool"]
    settings = {key: section.get(key) for key in PoolSettings.model_fields}
    payload["pool_settings"] = {key: v for key, v in settings.items() if v is not None}
    payload |= {"resource_pool": pools, "placement": placement}
    kinds_of_models = [kind for kind in RewardKind if kind is not RewardKind.RULE]
    # An unknown value counts as a rule, so that no second problem is reported for it.
    if payload["reward"].get("kind") not in (None, *kinds_of_models):
        _place_rule(raw, payload, "reward" in chosen)


def trains_adapters(payload: Tree) -> bool:
    """Whether the actor trains LoRA adapters; the reference is then the actor without them."""
    lora = payload[Role.ACTOR_ROLLOUT.value].get("lora")
    return isinstance(lora, dict) and lora.get("rank", 0) != 0


def _place_rule(raw: RawConfig, payload: Tree, is_placed: bool) -> None:
    """Place a rule on the actor's pool, or on another pool if placement is disaggregated.

    A placement in the YAML or a pool named `reward` has precedence. Notes a pool used by the rule
    only.
    """
    pools = payload["resource_pool"]
    placement = payload["placement"]
    pool = placement.pop("reward")
    if not is_placed and "reward" not in pools:
        pool = placement["actor_rollout"]
        is_split = payload[Role.ACTOR_ROLLOUT.value].get("num_gpus_for_infer") is not None
        if is_split:
            pool = placement.get("ref", placement.get("critic", pool))
    if isinstance(pool, str) and pool in pools and pool not in placement.values():
        meaning = "no role computes on its devices, as a rule needs none (reward.kind=rule)"
        raw.note(meaning, f"resource_pool.{pool}")
    placement["reward"] = pool


def _read_pools(raw: RawConfig, payload: Tree) -> dict[str, list[int]]:
    """Return each pool's processes per node, without empty pools.

    On a joined cluster a count above `device.devices_per_node` fills whole hosts.
    """
    pools: dict[str, list[int]] = {}
    num_problems_before = len(raw.problems)
    runtime = payload["runtime"]
    joins = runtime.get("kind") != "local" and choose_cluster(runtime.get("address")).address
    per_node = payload["device"].get("devices_per_node", DeviceConfig().devices_per_node)
    for spelled, size in raw.sections["resource_pool"].items():
        # Keys are names of the user's choice, but for dashes in those of roles.
        underscored = str(spelled).replace("-", "_")
        name = underscored if underscored in ROLES else str(spelled)
        key = f"resource_pool.{name}"
        sizes = size if isinstance(size, list) else [size]
        if name in PoolSettings.model_fields:
            continue
        if not all(type(count) is int and 0 < count <= MAX_DEVICES for count in sizes):
            rule = f"must be a number of devices from 1 to {MAX_DEVICES}, or one for each node"
            raw.problems.append(Problem(key, rule, repr(size), "use 1 or [8, 8]"))
        elif joins and type(size) is type(per_node) is int and size > per_node > 0:
            pools[name] = [per_node] * (size // per_node)
            if size % per_node:
                rule = f"must fill whole hosts of {per_node} devices"
                remedy = f"{use(multiples_around(size, per_node))}, or give one for each host"
                rule += f" ({ref('device.devices_per_node')})"
                raw.problems.append(Problem(key, rule, size, remedy))
        elif sizes:
            pools[name] = sizes
    if not pools and len(raw.problems) == num_problems_before:
        raw.problems.append(
            Problem("resource_pool", "is required", remedy="name a pool: `main: 2`")
        )
    return pools
