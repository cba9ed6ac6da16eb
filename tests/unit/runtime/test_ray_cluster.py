"""What can be tested without Ray; the rest is in `tests/distributed/runtime`."""

from __future__ import annotations

import socket

import pytest

from mindspeed_rlxf.config.errors import UserError
from mindspeed_rlxf.runtime.ray_cluster import forwarded_environment, open_cluster


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


def test_an_address_where_nobody_listens_is_refused_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with socket.socket() as taken:  # bound but not listening: nobody else gets the port
        taken.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        monkeypatch.setenv("RAY_ADDRESS", address)
        with pytest.raises(UserError, match=f"runtime.address={address} must be that of a running"):
            open_cluster(None, {})
