"""Environment variables of workers, with the source of each."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

from mindspeed_rlxf import device
from mindspeed_rlxf.config.enums import DeviceKind
from mindspeed_rlxf.config.errors import Problem
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
DRIVER, POOL = "driver", "resource_pool.env"


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
    """Return the contradictions between the variables that workers on `kind` would get.

    given: `resource_pool.env`
    """
    given = reveal(worker_environment(given, inherits=False))
    return [Problem(*found) for found in device.environment_problems(kind, given)]


def variables(given: Mapping[str, str]) -> list[Variable]:
    """List the variables that workers get from the driver and from the pool, by name."""
    found = [Variable(n, v, DRIVER) for n, v in forwarded_environment(os.environ).items()]
    found = [variable for variable in found if variable.name not in given]
    found += [Variable(name, value, POOL) for name, value in given.items()]
    return sorted(found, key=lambda variable: variable.name)
