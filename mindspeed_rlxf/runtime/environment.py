"""Environment variables of workers, and where each comes from."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

FORWARDED = ("HCCL_", "ASCEND_", "GLOO_", "TP_", "NCCL_")  # settings of communication libraries
DRIVER, POOL = "driver", "resource_pool.env"


@dataclass(frozen=True)
class Variable:
    """One variable of the workers, for the plan."""

    name: str
    value: str
    source: str


def forwarded_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """The settings of communication libraries; never which devices a process may see."""
    return {
        name: value
        for name, value in environment.items()
        if name.startswith(FORWARDED) and "VISIBLE_DEVICES" not in name
    }


def worker_environment(given: Mapping[str, str], inherits: bool) -> dict[str, str]:
    """Variables to set for a worker.

    given:    `resource_pool.env`, which comes before the driver's
    inherits: the worker has the driver's environment anyway, as on an own cluster
    """
    return dict(given) if inherits else {**forwarded_environment(os.environ), **given}


def variables(given: Mapping[str, str]) -> list[Variable]:
    """What workers get from the driver and from `resource_pool.env`, by name."""
    found = [Variable(n, v, DRIVER) for n, v in forwarded_environment(os.environ).items()]
    found = [variable for variable in found if variable.name not in given]
    found += [Variable(name, value, POOL) for name, value in given.items()]
    return sorted(found, key=lambda variable: variable.name)
