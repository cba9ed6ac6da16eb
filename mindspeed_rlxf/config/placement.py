"""Read the sections `resource_pool` and `placement`: processes of each pool, pool of each role."""

from mindspeed_rlxf.config.enums import CONFIGURED, RewardKind, Role, Stage
from mindspeed_rlxf.config.given import ROLES, Given, Tree
from mindspeed_rlxf.config.keys import unknown_key
from mindspeed_rlxf.config.problems import Problem, format_value, multiples_around, ref, use
from mindspeed_rlxf.config.ray_cluster import choose_cluster
from mindspeed_rlxf.config.sections import DeviceConfig, PoolSettings

MAX_DEVICES = 100_000
SETTINGS = PoolSettings.model_fields
"""Keys of `resource_pool` that name no pool."""


def place_roles(given: Given, payload: Tree) -> None:
    """Set `resource_pool`, `placement` and `pool_settings` of the payload.

    A role without a placement gets the pool of its name, else the only pool. A rule needs no
    devices and shares a pool. A reference whose log-probs nothing reads is not placed.
    """
    section = given.sections["resource_pool"]
    pools = _read_pools(given, payload)
    roles = [role.value for role in CONFIGURED if payload[role.value] is not None]
    chosen = dict(given.sections["placement"])
    for name in sorted(chosen.keys() - {*roles}):
        problem = unknown_key("placement", name, roles)
        if name == Role.CRITIC.value:
            remedy = "remove it ('~placement.critic' on the command line)"
            problem = Problem("placement.critic", "has no place in this stage", remedy=remedy)
        given.problems.append(problem)
        del chosen[name]
    only = next(iter(pools)) if len(pools) == 1 else None
    placement = {role: role if role in pools else only or role for role in roles} | chosen
    control = payload["algorithm"].get("kl_ctrl")
    no_penalty = isinstance(control, dict) and control.get("kl_coef") == 0
    pairs = payload["training"].get("stage") == Stage.RAY_ONLINE_DPO.value
    if no_penalty and not pairs and payload["logging"].get("reference_kl") is not True:
        pool = placement.pop(Role.REF.value)
        meaning = "no reference runs (logging.reference_kl=true keeps it, for the metric critic/kl)"
        given.note(meaning, "algorithm.kl_ctrl.kl_coef=0")
        if isinstance(pool, str) and pool in pools and pool not in placement.values():
            size = format_value(pools.pop(pool))
            given.note("not used, as no reference runs", f"resource_pool.{pool}={size}")
    settings = {key: section[key] for key in SETTINGS if section.get(key) is not None}
    payload |= {"resource_pool": pools, "placement": placement, "pool_settings": settings}
    # An unknown value counts as a rule, so that no second problem is reported for it.
    if payload["reward"].get("kind") not in (None, RewardKind.MODEL, RewardKind.HUGGING_FACE):
        _place_rule(given, payload, "reward" in chosen)


def _place_rule(given: Given, payload: Tree, is_placed: bool) -> None:
    """Place a rule on the actor's pool, or on another if that is disaggregated.

    Not if the YAML places it or has a pool `reward`. Notes a pool that only the rule would use.
    """
    pools, placement = payload["resource_pool"], payload["placement"]
    own = placement.pop("reward")
    if not is_placed and "reward" not in pools:
        split = payload[Role.ACTOR_ROLLOUT.value].get("num_gpus_for_infer") is not None
        own = placement["actor_rollout"]
        own = placement.get("ref", placement.get("critic", own)) if split else own
    if isinstance(own, str) and own in pools and own not in placement.values():
        meaning = "no role computes on its devices, as a rule needs none (reward.kind=rule)"
        given.note(meaning, f"resource_pool.{own}")
    placement["reward"] = own


def _read_pools(given: Given, payload: Tree) -> dict[str, list[int]]:
    """Return the processes per node of each pool; pools of size [] are left out.

    On a joined cluster a count above `device.devices_per_node` fills whole hosts.
    """
    pools: dict[str, list[int]] = {}
    before, runtime = len(given.problems), payload["runtime"]
    joins = runtime.get("kind") != "local" and choose_cluster(runtime.get("address")).address
    per_node = payload["device"].get("devices_per_node", DeviceConfig().devices_per_node)
    for spelled, size in given.sections["resource_pool"].items():
        # Keys are names of the user's choice, but for dashes in those of roles.
        underscored = str(spelled).replace("-", "_")
        name = underscored if underscored in ROLES else str(spelled)
        key, sizes = f"resource_pool.{name}", size if isinstance(size, list) else [size]
        if name in SETTINGS:
            continue
        if not all(type(count) is int and 0 < count <= MAX_DEVICES for count in sizes):
            rule = f"must be a number of devices from 1 to {MAX_DEVICES}, or one for each node"
            given.problems.append(Problem(key, rule, repr(size), "use 1 or [8, 8]"))
        elif not sizes and name not in ROLES:  # `reward: []` = the reward has none
            given.note("no role uses it, as it has no devices", f"{key}=[]")
        elif joins and type(size) is type(per_node) is int and size > per_node > 0:
            pools[name] = [per_node] * (size // per_node)
            if size % per_node:
                rule = f"must fill whole hosts of {per_node} devices"
                remedy = f"{use(multiples_around(size, per_node))}, or give one for each host"
                rule += f" ({ref('device.devices_per_node')})"
                given.problems.append(Problem(key, rule, size, remedy))
        elif sizes:
            pools[name] = sizes
    if not pools and len(given.problems) == before:
        given.problems.append(
            Problem("resource_pool", "is required", remedy="name a pool: `main: 2`")
        )
    return pools
