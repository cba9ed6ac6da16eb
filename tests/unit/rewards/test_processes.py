"""Descendants are found however deep they are and whoever their parent was."""

from __future__ import annotations

import subprocess
import sys

PROGRAM = """
import os, sys, time
from mindspeed_rlxf.rewards.sandbox import linux
from mindspeed_rlxf.rewards.sandbox.processes import Descendants, measure
linux.become_subreaper()
descendants = Descendants()
assert descendants.find() == set()
ready, told = os.pipe()
child = os.fork()
if not child:
    if os.fork():
        os._exit(0)  # the parent of the next one
    os.setsid()
    kept = b"x" * (40 << 20)
    os.write(told, str(os.getpid()).encode())
    time.sleep(100)
orphan = int(os.read(ready, 10))
found = descendants.find()
assert found == {child, orphan}, (found, child, orphan)
os.waitpid(child, 0)
assert descendants.find() == {orphan}
use = measure({orphan})
assert 40 << 20 <= use.memory < 80 << 20 and use.threads == 1, use
os.kill(orphan, 9)
os.waitpid(orphan, 0)
assert descendants.find() == set()
assert measure({orphan}).threads == 0
"""


def test_an_orphan_in_another_session_is_found_and_measured() -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
