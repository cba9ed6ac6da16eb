"""Settings of every test process: Ray's address, threads, hypothesis, groups of pytest-xdist."""

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import hypothesis
import pytest
import torch

from mindspeed_rlxf.device.cpu_adaptor import _uncompiled
from tests.forks import Forks

# Tests start clusters of their own and never join one that this user runs on the host.
os.environ.setdefault("RAY_ADDRESS", "local")

# Files that check all sandboxed programs on the host, and so would see those of each other.
SANDBOXES = ("test_sandbox.py", "test_programs.py", "test_program_processes.py")

# The matrices of tests are tiny, and the workers need the cores: more threads only cost time.
torch.set_num_threads(1)

# No test compiles; Megatron's import would load the compiler, which takes seconds.
torch.compile = _uncompiled  # type: ignore[assignment]

# Under nohup it is ignored, also by the programs that tests start and then hang up.
signal.signal(signal.SIGHUP, signal.SIG_DFL)

# The time of an example depends on the machine, so it must not fail a test.
hypothesis.settings.register_profile("no deadline", deadline=None)
hypothesis.settings.load_profile("no deadline")


@pytest.hookimpl(tryfirst=True)  # before xdist reads the marks
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark each test with the group that one process of pytest-xdist runs (`--dist loadgroup`).

    Groups: the tests that share one Ray session, those of SANDBOXES, and every other file by
    itself. Does nothing without pytest-xdist.
    """
    if not config.pluginmanager.hasplugin("xdist"):
        return
    for item in items:
        folders, group = Path(item.path).parts, item.path.name
        if group in SANDBOXES:
            group = "sandbox"
        elif "cluster" in folders and "distributed" in folders:
            group = "ray"
        item.add_marker(pytest.mark.xdist_group(group))


@pytest.fixture(scope="session")
def forks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Forks]:
    """The server of forks, which the processes of pytest-xdist share."""
    folder = tmp_path_factory.getbasetemp()
    server = Forks(folder.parent if "PYTEST_XDIST_WORKER" in os.environ else folder)
    try:
        yield server
    finally:
        server.end()
