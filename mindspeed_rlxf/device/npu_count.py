"""Count the NPUs that a process of this host may use, without importing torch_npu in this process.

Only workers import torch_npu (`device/npu.py`). The import takes seconds, cannot be undone, and may
claim device memory, which the driver would keep until the end of the run.
"""

from __future__ import annotations

import importlib.util
import logging
import os
import subprocess
import sys

from mindspeed_rlxf.config.enums import DeviceKind
from mindspeed_rlxf.device import driver, npu, visible

logger = logging.getLogger(__name__)

IMPORT_S = 40.0  # time to import torch and torch_npu from a network file system
ANSWER = "devices: "
ASK = f"import torch, torch_npu; print({ANSWER!r} + str(torch_npu.npu.device_count()))"


def count_npus() -> int:
    """Return the number of NPUs that npu-smi lists, or ASCEND_RT_VISIBLE_DEVICES names if fewer.

    If npu-smi is missing, fails or lists none, torch_npu counts them in a separate process. Raises
    ValueError when CANN or torch_npu is missing, or neither npu-smi nor torch_npu answers.
    """
    check_installed()
    view = driver.query_driver(DeviceKind.NPU)
    assert view is not None, "an NPU has a driver"
    if view.problem or not view.devices:
        problem = view.problem or f"{view.tool} lists no device"
        logger.info("%s: torch_npu counts the devices in a separate process", problem)
        return count_by_torch(problem)
    listed = visible.list_visible(npu.VISIBLE)
    return min(len(listed), len(view.devices)) if listed else len(view.devices)


def check_installed() -> None:
    """Raise ValueError if `npu.check_cann` does or torch_npu is not on the path; import nothing."""
    npu.check_cann(os.environ)
    if importlib.util.find_spec("torch_npu") is None:
        raise ValueError(npu.NOT_INSTALLED.format("it is not on the path"))


def count_by_torch(reason: str = "") -> int:
    """Return the number of NPUs that torch_npu sees, counted in a separate process.

    reason: why npu-smi did not answer, for the message of the error
    Raises ValueError when CANN or torch_npu is missing, or the process fails or hangs.
    """
    check_installed()
    try:
        done = driver.run_within([sys.executable, "-c", ASK], IMPORT_S)
    except subprocess.TimeoutExpired:
        raise ValueError(_describe_failure(reason, f"no answer within {IMPORT_S:g} s")) from None
    answers = [line for line in done.stdout.splitlines() if line.startswith(ANSWER)]
    if done.returncode == 0 and answers:
        return int(answers[-1].removeprefix(ANSWER))
    output = (done.stderr or done.stdout).strip().splitlines() or ["nothing"]
    last = output[-1][:300]
    raise ValueError(_describe_failure(reason, f"ended with {done.returncode}, printing {last}"))


def _describe_failure(reason: str, result: str) -> str:
    """Return an error text: why npu-smi (`reason`) and torch_npu (`result`) did not count."""
    tool = f"{reason}, and " if reason else ""
    return (
        f"the NPUs of this host must be counted, which failed: {tool}torch_npu in a separate "
        f"process: {result}; put npu-smi on PATH, mount it and /dev/davinci* into the container, "
        "or correct what torch_npu reports"
    )
