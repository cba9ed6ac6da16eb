"""No other user of the host can enter the cluster that a run starts."""

from __future__ import annotations

import os
import stat
from typing import Any

from mindspeed_rlxf.cluster.ray.cluster import asks_for_token

SOCKET_BYTES = 107  # of the path of a unix socket


def test_no_other_user_enters_the_folder_of_an_own_cluster(ray_runtime: Any) -> None:
    folder = ray_runtime.cluster.temp_dir
    found = folder.lstat()
    assert stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid()
    assert stat.S_IMODE(found.st_mode) == 0o700
    sockets = [path for path in folder.rglob("*") if stat.S_ISSOCK(path.lstat().st_mode)]
    assert {path.name for path in sockets} >= {"raylet", "plasma_store"}  # Ray works in there
    assert max(len(os.fsencode(path)) for path in sockets) <= SOCKET_BYTES
    assert list(folder.rglob("logs/raylet.out"))


def test_an_own_cluster_asks_for_a_token(ray_runtime: Any) -> None:
    assert asks_for_token(ray_runtime.cluster.address)
