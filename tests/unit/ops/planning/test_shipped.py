"""The shipped configurations of real models plan, and fit devices of 64 GiB."""

from __future__ import annotations

import pytest

from mindspeed_rlxf.config.compose import builtin_config_dir, compose, config_names
from mindspeed_rlxf.config.resolve import resolve
from mindspeed_rlxf.ops.planning.plan import plan

REAL = [name for name in config_names([builtin_config_dir()]) if "tiny" not in name]
ON_A_CLUSTER = ["device.kind=npu", "device.memory_gib=64", "runtime.address=head:6379"]


@pytest.mark.parametrize("name", REAL)
def test_it_plans_and_fits(name: str) -> None:
    config = resolve(compose(name, ON_A_CLUSTER), name)
    made = plan(config)
    verdicts = [line.strip() for line in made.text.splitlines() if ", has 64.0 GiB" in line]
    assert len(verdicts) == len(config.resource_pool)
    assert all(verdict.startswith("fits: needs ") for verdict in verdicts), verdicts
    assert len(made.text.splitlines()) < 150


def test_there_is_one_for_every_family() -> None:
    assert len(REAL) == 17
