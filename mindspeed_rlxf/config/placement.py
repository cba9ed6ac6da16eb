"""Read the sections `resource_pool` and `placement`: processes of each pool, pool of each role."""

from typing import Any

from mindspeed_rlxf.config.enums import CONFIGURED, RewardKind, Role, Stage
from mindspeed_rlxf.config.given import Given, Tree
from mindspeed_rlxf.config.keys import unknown_key
from mindspeed_rlxf.config.problems import Problem, format_value, multiples_around, ref, use
from mindspeed_rlxf.config.ray_cluster import choose_cluster
from mindspeed_rlxf.config.secrets import MASK, SECRET_NAME, Secret, variable_secret
from mindspeed_rlxf.config.sections import DeviceConfig, PoolSettings

MAX_DEVICES = 100_000
SETTINGS = tuple(PoolSettings.model_fields)
"""Keys of `resource_pool` that name no pool."""
ROLE_NAMES = {role.value for role in CONFIGURED}
MODEL_KINDS = (RewardKind.MODEL, RewardKind.HUGGING_FACE)


def needs_reference(payload: Tree) -> bool:
    """Return whether anything reads the reference's log-probs: KL, online DPO or a metric."""
    control = payload["algorithm"].get("kl_ctrl")
    no_penalty = isinstance(control, dict) and control.get("kl_coef") == 0
    prefers_pairs = payload["training"].get("stage") == Stage.RAY_ONLINE_DPO.value
    return prefers_pairs or not no_penalty or payload["logging"].get("reference_kl") is True


def place_roles(given: Given, payload: Tree) -> None:
    """Set `resource_pool`, `placement` and `pool_settings` of the payload.

    A role without a placement gets the pool of its name, else the only pool. A rule needs no
    devices and shares a pool. A reference whose log-probs nothing reads is not placed.
    """
    section = given.sections["resource_pool"]
    settings = {key: section[key] for key in SETTINGS if section.get(key) is not None}
    _read_environment(given, settings)
    pools = _read_pools(given, section, _devices_per_node(payload))
    roles = [role.value for role in CONFIGURED if payload[role.value] is not None]
    chosen = dict(given.sections["placement"])
    if Role.CRITIC.value in chosen and Role.CRITIC.value not in roles:
        del chosen[Role.CRITIC.value]
        rule = f"{ref('training.stage')}={payload['training'].get('stage')} has no critic"
        remedy = "remove it ('~placement.critic' on the command line)"
        given.problems.append(Problem("placement.critic", rule, remedy=remedy, colon=True))
    for name in sorted(chosen.keys() - set(roles)):
        given.problems.append(unknown_key("placement", name, set(roles)))
        del chosen[name]
    only = next(iter(pools)) if len(pools) == 1 else None
    placement = {role: role if role in pools else only or role for role in roles} | chosen
    if not needs_reference(payload):
        _remove_reference(given, pools, placement)
    payload |= {"resource_pool": pools, "placement": placement, "pool_settings": settings}
    # An unknown value counts as a rule, so that no second problem is reported for it.
    if payload["reward"].get("kind") not in (None, *MODEL_KINDS):
        _place_rule(given, payload, "reward" in chosen)


def _remove_reference(given: Given, pools: Tree, placement: Tree) -> None:
    pool = placement.pop(Role.REF.value)
    meaning = "no reference runs (logging.reference_kl=true keeps it, for the metric critic/kl)"
    given.note(meaning, "algorithm.kl_ctrl.kl_coef=0")
    if isinstance(pool, str) and pool in pools and pool not in placement.values():
        size = pools.pop(pool)
        given.note("not used, as no reference runs", f"resource_pool.{pool}={format_value(size)}")


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


def _read_pools(given: Given, section: Tree, per_node: Any) -> dict[str, list[int]]:
    """Return the processes per node of each pool; pools of size [] are left out."""
    pools = {}
    before = len(given.problems)
    for spelled, size in section.items():
        # Keys are names of the user's choice, but for dashes in those of roles.
        underscored = str(spelled).replace("-", "_")
        name = underscored if underscored in ROLE_NAMES else str(spelled)
        if name in SETTINGS:
            continue
        if sizes := _node_sizes(given, f"resource_pool.{name}", size, per_node):
            pools[name] = sizes
        elif size == [] and name not in ROLE_NAMES:  # `reward: []` = the reward has none
            given.note("no role uses it, as it has no devices", f"resource_pool.{name}=[]")
    if not pools and len(given.problems) == before:
        remedy = "name a pool: `main: 2`"
        given.problems.append(Problem("resource_pool", "is required", remedy=remedy))
    return pools


def _read_environment(given: Given, settings: Tree) -> None:
    """Replace the values of `resource_pool.env` by secrets; numbers become strings."""
    if not isinstance(settings.get("env"), dict):
        return
    variables = {}
    for name, value in settings["env"].items():
        key = f"resource_pool.env.{name}"
        variables[str(name)] = variable_secret(str(name), str(value))
        if "VISIBLE_DEVICES" in str(name):
            rule = "must not be set, because Ray hands out the devices"
            given.problems.append(Problem(key, rule, remedy="remove it"))
        if isinstance(value, Secret):
            variables[str(name)] = value
        elif isinstance(value, bool) or not isinstance(value, (str, int, float)):
            shown = None if SECRET_NAME.fullmatch(str(name)) else format_value(value)
            given.problems.append(Problem(key, "must be text", shown, "put it in quotes"))
        elif MASK in str(value):
            remedy = f"give it again, by ${{oc.env:{name}}}"
            given.problems.append(Problem(key, "hides a secret", MASK, remedy))
    settings["env"] = variables


def _devices_per_node(payload: Tree) -> Any:
    """Return `device.devices_per_node`; None where the run starts its own processes."""
    runtime = payload["runtime"]
    is_local = runtime.get("kind") == "local"
    if is_local or choose_cluster(runtime.get("address")).address is None:
        return None
    return payload["device"].get("devices_per_node", DeviceConfig().devices_per_node)


def _node_sizes(given: Given, path: str, size: Any, per_node: Any) -> list[int]:
    """Return the processes per node for a size such as 8 or [8, 8]; [] for a wrong one.

    A count above `per_node` fills whole hosts.
    """
    sizes = size if isinstance(size, list) else [size]
    if not all(type(count) is int and 0 < count <= MAX_DEVICES for count in sizes):
        rule = f"must be a number of devices from 1 to {MAX_DEVICES}, or a list of such per node"
        given.problems.append(Problem(path, rule, repr(size), "use 1 or [8, 8]"))
        return []
    if type(size) is not int or type(per_node) is not int or not size > per_node > 0:
        return sizes
    if size % per_node:
        rule = f"must fill whole hosts of {per_node} devices ({ref('device.devices_per_node')})"
        remedy = f"{use(multiples_around(size, per_node))}, or give a list with a number per host"
        given.problems.append(Problem(path, rule, size, remedy))
        return []
    return [per_node] * (size // per_node)
