"""Which cluster a run joins."""

import os
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from mindspeed_rlxf.config import ray_cluster
from mindspeed_rlxf.config.load import resolve
from mindspeed_rlxf.config.ray_cluster import Cluster, choose_cluster
from mindspeed_rlxf.config.secrets import reveal


@pytest.fixture
def left_by_ray_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The note of a cluster that answers."""
    monkeypatch.undo()  # the stand-in of `no_cluster`
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path))
    with socket.create_server(("127.0.0.1", 0)) as server:
        note = tmp_path / "ray" / "ray_current_cluster"
        note.parent.mkdir()
        note.write_text(f"127.0.0.1:{server.getsockname()[1]}\n")
        yield note


def test_a_named_cluster_takes_precedence_over_a_running_one(left_by_ray_start, monkeypatch):
    found = choose_cluster(None)
    assert found.address == left_by_ray_start.read_text().strip()
    assert found.source.startswith("`ray start` of this user")
    monkeypatch.setenv("RAY_ADDRESS", "head:1")
    assert choose_cluster(None) == Cluster("head:1", "RAY_ADDRESS=head:1")
    assert choose_cluster("other:2") == Cluster("other:2", "runtime.address=other:2")
    assert choose_cluster("local") == Cluster(None, "runtime.address=local")
    assert choose_cluster("auto").address == left_by_ray_start.read_text().strip()


def test_a_cluster_of_another_user_is_not_joined(left_by_ray_start, monkeypatch):
    uid = os.getuid()
    monkeypatch.setattr(ray_cluster.os, "getuid", lambda: uid + 1)
    assert choose_cluster(None).address is None


def test_the_note_of_a_cluster_that_ended_is_not_believed(left_by_ray_start):
    with socket.socket() as taken:  # bound but not listening
        taken.bind(("127.0.0.1", 0))
        left_by_ray_start.write_text(f"127.0.0.1:{taken.getsockname()[1]}")
        assert choose_cluster(None).address is None
    left_by_ray_start.unlink()
    assert choose_cluster(None).address is None


def test_other_keys_of_resource_pool_are_no_pools(make_tree):
    tree = make_tree({"resource_pool.wait_s": 5, "resource_pool.env": {"HCCL_BUFFSIZE": 256}})
    config = resolve(tree, "t")
    assert config.resource_pool == {"main": [8]}
    assert config.pool_settings.wait_s == 5.0
    assert reveal(config.pool_settings.env) == {"HCCL_BUFFSIZE": "256"}
