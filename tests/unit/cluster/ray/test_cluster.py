"""Opening a Ray cluster, as far as it works without Ray; see also `tests/distributed/cluster`."""

import os
import socket
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from unittest.mock import Mock

import pytest

from mindspeed_rlxf.cluster.ray import cluster
from mindspeed_rlxf.cluster.ray.cluster import RayCluster, open_cluster
from mindspeed_rlxf.config.problems import UserError


def test_an_address_where_nobody_listens_is_refused_at_once(monkeypatch):
    with socket.socket() as taken:  # bound but not listening: nobody else gets the port
        taken.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        monkeypatch.setenv("RAY_ADDRESS", address)
        with pytest.raises(UserError, match=f"runtime.address={address} must be that of a running"):
            open_cluster(None, {})


def test_a_start_that_ray_gives_up_is_tried_again(monkeypatch):
    """Ray waits 30 s for its own processes, also on a busy host."""
    slow = Exception("The current node timed out during startup. This could happen ...")
    own = RayCluster(own=True, address="127.0.0.1:1")
    start = Mock(side_effect=[slow, own])
    for name in ("_set_token_mode", "_keep_quiet"):
        monkeypatch.setattr(cluster, name, Mock())
    monkeypatch.setattr(cluster, "_try_to_start", start)
    monkeypatch.setattr(os, "environ", dict(os.environ))
    assert open_cluster("local", {"lab": 2}) is own
    for raised in ([slow, slow], [ValueError("another"), own]):
        start.side_effect = raised
        with pytest.raises(type(raised[0]), match=r"timed out|another"):
            open_cluster("local", {"lab": 2})


def test_ray_still_says_so_when_it_gives_up():
    (folder,) = find_spec("ray").submodule_search_locations
    assert cluster.START_TIMED_OUT[0] in (Path(folder) / "_private" / "node.py").read_text()


def test_processes_of_a_cluster_do_not_end_with_the_terminal() -> None:
    """Ray starts them in the group of the driver, which a closed terminal signals."""
    asks = "import signal; print(signal.SIGHUP in signal.pthread_sigmask(signal.SIG_BLOCK, []))"

    def is_blocked_in_a_child() -> bool:
        return subprocess.check_output([sys.executable, "-c", asks], text=True) == "True\n"

    with cluster._own_signals():
        assert is_blocked_in_a_child()
    assert not is_blocked_in_a_child(), "the driver handles it again"
