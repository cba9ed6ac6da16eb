"""Settings of every test process."""

import os
from pathlib import Path

import hypothesis
import pytest
import torch

# The tests have clusters of their own, whatever Ray this user runs on this host.
os.environ.setdefault("RAY_ADDRESS", "local")

# Files of tests/distributed whose short tests have one worker, and so leave room for others.
ONE_WORKER = ("test_bf16.py", "test_golden.py", "test_kills.py", "test_trl_parity.py")

# Files that look at all programs of a sandbox on the host, also those that other files started.
SANDBOXES = ("test_sandbox.py", "test_programs.py", "test_program_processes.py")

# The tests' matrices are tiny, and the machine is shared with the workers: threads only get in the
# way of each other.
torch.set_num_threads(1)

# How long an example takes says something about the machine, nothing about the code.
hypothesis.settings.register_profile("no deadline", deadline=None)
hypothesis.settings.load_profile("no deadline")


@pytest.hookimpl(tryfirst=True)  # before xdist reads the marks
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """With several test processes (`-n 2 --dist loadgroup`) one runs all that shares Ray's session,
    another the runs of one worker in a session of its own, and the rest goes file by file, but for
    those of the sandbox."""
    if not config.pluginmanager.hasplugin("xdist"):
        return
    for item in items:
        if "distributed" in Path(item.path).parts:
            group = "one worker" if item.path.name in ONE_WORKER else "ray"
        else:
            group = "sandbox" if item.path.name in SANDBOXES else item.path.name
        item.add_marker(pytest.mark.xdist_group(group))
