"""Settings of every test process: Ray's address, threads, hypothesis, groups of pytest-xdist."""

import os
from pathlib import Path

import hypothesis
import pytest
import torch

# Tests start clusters of their own and never join one that this user runs on the host.
os.environ.setdefault("RAY_ADDRESS", "local")

# Files of tests/distributed whose tests use one worker and so can run beside the other Ray tests.
ONE_WORKER = ("test_bf16.py", "test_golden.py", "test_trl_parity.py")

# Files of tests/distributed that use no Ray session of the tests.
NO_SESSION = ("test_fsdp.py", "test_kills.py", "test_older_run.py", "test_planned_peak.py")

# Files that check all sandboxed programs on the host, and so would see those of each other.
SANDBOXES = ("test_sandbox.py", "test_programs.py", "test_program_processes.py")

# The matrices of tests are tiny, and the workers need the cores: more threads only cost time.
torch.set_num_threads(1)

# The time of an example depends on the machine, so it must not fail a test.
hypothesis.settings.register_profile("no deadline", deadline=None)
hypothesis.settings.load_profile("no deadline")


@pytest.hookimpl(tryfirst=True)  # before xdist reads the marks
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark each test with the group that one process of pytest-xdist runs (`--dist loadgroup`).

    Groups: the tests that share one Ray session, those of the cluster and those of ONE_WORKER with
    sessions of their own, those of SANDBOXES, and every other file by itself. Does nothing without
    pytest-xdist.
    """
    if not config.pluginmanager.hasplugin("xdist"):
        return
    for item in items:
        folders, group = Path(item.path).parts, item.path.name
        if group in ONE_WORKER:
            group = "one worker"
        elif group in SANDBOXES:
            group = "sandbox"
        elif "distributed" in folders and group not in NO_SESSION:
            group = "cluster" if "cluster" in folders else "ray"
        item.add_marker(pytest.mark.xdist_group(group))
