"""Environment variables of workers, with the source of each."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

from mindspeed_rlxf import device
from mindspeed_rlxf.config.enums import DeviceKind
from mindspeed_rlxf.config.errors import Problem
from mindspeed_rlxf.config.schema import RunConfig
from mindspeed_rlxf.config.secret_words import withhold
from mindspeed_rlxf.config.withheld import reveal

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
    """One variable of the workers, for the plan. value: `***` for a secret"""

    name: str
    value: str
    source: str


def forwarded_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """Select the settings of communication libraries and of torch on NPU.

    Visibility of devices is never among them. Secrets are withheld, see `config.withheld`.
    """
    return {
        name: withhold(name, value)
        for name, value in environment.items()
        if (name.startswith(FORWARDED) or name in FORWARDED_NAMES) and "VISIBLE_DEVICES" not in name
    }


def worker_environment(given: Mapping[str, str], inherits: bool) -> dict[str, str]:
    """Return the variables to set for a worker.

    given:    `resource_pool.env`, which comes before the driver's
    inherits: the worker has the driver's environment anyway, as on an own cluster
    """
    return dict(given) if inherits else {**forwarded_environment(os.environ), **given}


def problems(kind: DeviceKind, given: Mapping[str, str]) -> list[Problem]:
    """Return the contradictions between the variables that the workers of a run would get.

    given: `resource_pool.env`, which comes after the forwarded variables of this process
    """
    given = reveal(worker_environment(given, inherits=False))
    return [Problem(*found) for found in device.environment_problems(kind, given)]


def offload_environment(config: RunConfig) -> dict[str, str]:
    """Return settings of the allocator for a run that offloads; the user's own take precedence."""
    offloads = [config.role(role).offload for role in config.roles]
    if not any(offload.weights or offload.optimizer for offload in offloads):
        return {}
    given = {*os.environ, *config.pool_settings.env}
    wanted = device.shared_memory_environment(config.device.kind)
    return {name: value for name, value in wanted.items() if name not in given}


def variables(
    given: Mapping[str, str], offloading: Mapping[str, str] | None = None
) -> list[Variable]:
    """List the variables that workers get, by name.

    given:      `resource_pool.env`
    offloading: `offload_environment`
    """
    found = [Variable(n, v, DRIVER) for n, v in forwarded_environment(os.environ).items()]
    found = [variable for variable in found if variable.name not in given]
    found += [Variable(name, value, POOL) for name, value in given.items()]
    found += [Variable(name, value, OFFLOAD) for name, value in (offloading or {}).items()]
    return sorted(found, key=lambda variable: variable.name)
