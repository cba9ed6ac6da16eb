"""Opening a Ray cluster, as far as it works without Ray; see also `tests/distributed/cluster`."""

from __future__ import annotations

import socket

import pytest

from mindspeed_rlxf.cluster.ray import runtime as ray_runtime
from mindspeed_rlxf.cluster.ray.cluster import open_cluster
from mindspeed_rlxf.config.errors import UserError
from mindspeed_rlxf.config.schema import DeviceConfig, RuntimeConfig


def test_an_address_where_nobody_listens_is_refused_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with socket.socket() as taken:  # bound but not listening: nobody else gets the port
        taken.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        monkeypatch.setenv("RAY_ADDRESS", address)
        with pytest.raises(UserError, match=f"runtime.address={address} must be that of a running"):
            open_cluster(None, {})


def test_the_key_for_clusters_without_tokens_reaches_the_one_that_joins(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(address: str, resources: dict[str, float], allow: bool) -> None:
        raise InterruptedError(f"{address} {allow}")

    monkeypatch.setattr(ray_runtime, "open_cluster", refuse)
    for allow in (False, True):
        settings = RuntimeConfig(address="head:1", allow_unauthenticated=allow)
        with pytest.raises(InterruptedError, match=f"head:1 {allow}"):
            ray_runtime.RayRuntime(DeviceConfig(), settings, 1)
