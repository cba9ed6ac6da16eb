"""The guard process ends a cluster's processes when the driver is gone."""

import subprocess
import sys
import time

from mindspeed_rlxf.cluster.ray.cluster import OrphanGuard


def test_a_killed_guard_is_replaced_and_ends_the_processes_of_its_cluster_alone(tmp_path):
    folder = tmp_path / "cluster"
    folder.mkdir()
    sleeper = "import time; time.sleep(300)"
    named = subprocess.Popen([sys.executable, "-c", sleeper, str(folder)])
    other = subprocess.Popen([sys.executable, "-c", sleeper])
    guard = OrphanGuard(folder)
    try:
        first = guard.process
        first.kill()
        deadline = time.monotonic() + 20
        while guard.process is first:
            assert time.monotonic() < deadline
            time.sleep(0.05)
        assert named.poll() is None
        guard.end()
        assert named.wait(20) == -9 and other.poll() is None
        assert not folder.exists() and guard.process.poll() == 0
    finally:
        for process in (named, other):
            process.kill()
            process.wait()
        guard.end()
