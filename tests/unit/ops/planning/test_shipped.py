"""The shipped configurations of real models plan, and fit devices of 64 GiB."""

import pytest

from mindspeed_rlxf.config.compose import builtin_config_dir, compose, config_names
from mindspeed_rlxf.config.load import resolve
from mindspeed_rlxf.ops.planning.host_memory import host_memory_needed
from mindspeed_rlxf.ops.planning.memory import pool_memories
from mindspeed_rlxf.ops.planning.plan import plan
from mindspeed_rlxf.ops.sizes import GIB

REAL = [name for name in config_names([builtin_config_dir()]) if "tiny" not in name]
ON_A_CLUSTER = ["device.kind=npu", "device.memory_gib=64", "runtime.address=head:6379"]


@pytest.mark.parametrize("name", REAL)
def test_a_shipped_configuration_plans_and_fits_64_gib(name: str) -> None:
    config = resolve(compose(name, ON_A_CLUSTER), name)
    made = plan(config)
    verdicts = [line.strip() for line in made.text.splitlines() if ", has 64.0 GiB" in line]
    assert len(verdicts) == len(config.resource_pool)
    assert all(verdict.startswith("fits: needs ") for verdict in verdicts), verdicts
    assert len(made.text.splitlines()) < 150


@pytest.mark.parametrize("name", [name for name in REAL if name.endswith("node")])
def test_those_of_few_hosts_leave_a_tenth_of_the_device_and_fit_the_host(name: str) -> None:
    """Of 64 GiB, after 4 for the runtime; with 600 GiB of each host."""
    config = resolve(compose(name, ON_A_CLUSTER), name)
    pools = pool_memories(config)
    assert max(each.total for each in pools) <= 0.9 * (64 - 4) * GIB
    assert host_memory_needed(config, pools).total <= 600 * GIB
    assert {config.placement[role] for role in config.roles} == {"main"}
    hosts = int(name[-5])
    assert config.resource_pool["main"] == [8] * hosts
    actor = config.actor_rollout
    assert actor.max_prompt_length == 1024
    assert actor.max_new_tokens == (32768 if "_32k_" in name else 8192)
