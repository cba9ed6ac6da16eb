"""Which variables workers get."""

from __future__ import annotations

import pytest

from mindspeed_rlxf.runtime.environment import (
    Variable,
    forwarded_environment,
    variables,
    worker_environment,
)


def test_settings_of_communication_libraries_are_forwarded_but_no_visibility() -> None:
    environment = {
        "HCCL_CONNECT_TIMEOUT": "1",
        "ASCEND_LAUNCH_BLOCKING": "1",
        "GLOO_SOCKET_IFNAME": "eth0",
        "TP_SOCKET_IFNAME": "eth0",
        "NCCL_DEBUG": "INFO",
    }
    hidden = {"ASCEND_RT_VISIBLE_DEVICES": "0", "CUDA_VISIBLE_DEVICES": "0", "HOME": "/"}
    assert forwarded_environment({**environment, **hidden}) == environment


def test_variables_of_the_pool_come_before_the_drivers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HCCL_BUFFSIZE", "200")
    monkeypatch.setenv("HCCL_CONNECT_TIMEOUT", "60")
    given = {"HCCL_BUFFSIZE": "256", "OMP_NUM_THREADS": "1"}
    found = worker_environment(given, inherits=False)
    assert {name: found[name] for name in (*given, "HCCL_CONNECT_TIMEOUT")} == {
        **given,
        "HCCL_CONNECT_TIMEOUT": "60",
    }
    assert worker_environment(given, inherits=True) == given
    shown = [v for v in variables(given) if v.name in found]
    assert Variable("HCCL_BUFFSIZE", "256", "resource_pool.env") in shown
    assert Variable("HCCL_CONNECT_TIMEOUT", "60", "driver") in shown
    assert len({v.name for v in shown}) == len(shown)
