"""What can be tested without Ray; the rest is in `tests/distributed/runtime`."""

from __future__ import annotations

import socket

import pytest

from mindspeed_rlxf.config.errors import UserError
from mindspeed_rlxf.runtime.ray_cluster import open_cluster


def test_an_address_where_nobody_listens_is_refused_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with socket.socket() as taken:  # bound but not listening: nobody else gets the port
        taken.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        monkeypatch.setenv("RAY_ADDRESS", address)
        with pytest.raises(UserError, match=f"runtime.address={address} must be that of a running"):
            open_cluster(None, {})
