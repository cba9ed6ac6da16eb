"""Environment variables of workers, with the source of each."""

import os
from collections.abc import Mapping
from dataclasses import dataclass

from mindspeed_rlxf import device
from mindspeed_rlxf.config.enums import DeviceKind
from mindspeed_rlxf.config.problems import Problem
from mindspeed_rlxf.config.schema import RunConfig
from mindspeed_rlxf.config.secrets import Secret, reveal, variable_secret

FORWARDED = ("HCCL_", "ASCEND_", "GLOO_", "TP_", "NCCL_")  # settings of communication libraries
FORWARDED_NAMES = (  # torch on NPU, and what `training.deterministic` sets beside HCCL's
    "TASK_QUEUE_ENABLE",
    "CPU_AFFINITY_CONF",
    "PYTORCH_NPU_ALLOC_CONF",
    "CLOSE_MATMUL_K_SHIFT",
    "ATB_MATMUL_SHUFFLE_K_ENABLE",
    "LCCL_DETERMINISTIC",
)
DRIVER, POOL, OFFLOAD = "driver", "resource_pool.env", "offload"


@dataclass(frozen=True)
class Variable:
    """An environment variable of the workers, for the plan. value: `***` for a secret"""

    name: str
    value: str
    source: str


def forwarded_environment(environment: Mapping[str, str]) -> dict[str, Secret]:
    """Return the variables in `environment` that begin with FORWARDED or are in FORWARDED_NAMES.

    They are settings of communication libraries and of torch on NPU. Lists of visible devices are
    left out.
    """
    return {
        name: variable_secret(name, value)
        for name, value in environment.items()
        if (name.startswith(FORWARDED) or name in FORWARDED_NAMES) and "VISIBLE_DEVICES" not in name
    }


def worker_environment(given: Mapping[str, Secret], inherits: bool) -> dict[str, Secret]:
    """Return the variables to set for a worker: `forwarded_environment` of ours, and `given`.

    given:    `resource_pool.env`, which takes precedence over the driver's variables
    inherits: True = workers inherit the driver's environment, so that only `given` is returned
    """
    return dict(given) if inherits else {**forwarded_environment(os.environ), **given}


def find_problems(kind: DeviceKind, given: Mapping[str, Secret]) -> list[Problem]:
    """Return a Problem for each contradiction between the variables that workers would get."""
    variables = reveal(worker_environment(given, inherits=False))
    return [Problem(*found) for found in device.environment_problems(kind, variables)]


def offload_environment(config: RunConfig) -> dict[str, str]:
    """Return the allocator's variables for a run with offload, except those the user has set."""
    offloads = [config.role(role).offload for role in config.roles]
    if not any(offload.weights or offload.optimizer for offload in offloads):
        return {}
    given = {*os.environ, *config.pool_settings.env}
    wanted = device.shared_memory_environment(config.device.kind)
    return {name: value for name, value in wanted.items() if name not in given}


def list_variables(
    given: Mapping[str, Secret], offloading: Mapping[str, str] | None = None
) -> list[Variable]:
    """Return the variables that workers get, sorted by name, each with its source."""
    found = [Variable(n, str(v), DRIVER) for n, v in forwarded_environment(os.environ).items()]
    found = [variable for variable in found if variable.name not in given]
    found += [Variable(name, str(value), POOL) for name, value in given.items()]
    found += [Variable(name, value, OFFLOAD) for name, value in (offloading or {}).items()]
    return sorted(found, key=lambda variable: variable.name)
