"""Set up a worker's Ascend NPU, from CANN's environment to a patched Megatron.

`start` takes these steps, whose order matters:

    CANN environment -> torch_npu -> this process's device -> MindSpeed's adaptor (once)
    -> repatch (once) -> Megatron, imported later by the roles

All roles in a process share the patches, because removing them would change functions used by
existing models. MindSpeed keeps its arguments in one namespace, whose values become defaults for
every later `TransformerConfig`. So `ARGUMENTS` has only values shared by all roles; each role sets
its layout and sizes in its own config.
"""

import ctypes.util
import importlib
import importlib.util
import logging
import math
import os
import sys
from collections.abc import Callable, Mapping
from functools import cache, wraps
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from mindspeed_rlxf.config.enums import DeviceKind
from mindspeed_rlxf.device import driver, npu_versions, visible
from mindspeed_rlxf.device.npu_versions import HOME

logger = logging.getLogger(__name__)

VISIBLE = "ASCEND_RT_VISIBLE_DEVICES"
LIBRARY = "libascendcl.so"
SOURCE_IT = "run `source <CANN>/set_env.sh` on every node before `ray start` (or this command)"
ARGUMENTS: Mapping[str, Any] = {
    "use_flash_attn": True,
    "transformer_impl": "local",  # our models' layers; the other choice needs Transformer Engine
    "context_parallel_size": 1,
}
BUFFER_MIB = 200  # HCCL's default of HCCL_BUFFSIZE; a communicator has one to send, one to receive
NOT_INSTALLED = (
    "device.kind=npu needs torch_npu, which cannot be imported ({}); install it, or use "
    "device.kind=cpu"
)
CONNECT, EXECUTE, EVENT = "HCCL_CONNECT_TIMEOUT", "HCCL_EXEC_TIMEOUT", "HCCL_EVENT_TIMEOUT"
CONNECT_S = (120, 7200)  # range of HCCL_CONNECT_TIMEOUT; the first is its default
EVENT_S, EVENT_MARGIN_S = 1868, 32  # default of HCCL_EVENT_TIMEOUT, and its lead over EXECUTE
# Environment variables that make sums repeatable.
DETERMINISTIC: Mapping[str, str] = {
    "HCCL_DETERMINISTIC": "true",
    "LCCL_DETERMINISTIC": "1",  # HCCL on the vector cores, HCCL_OP_EXPANSION_MODE=AIV
    "CLOSE_MATMUL_K_SHIFT": "1",  # the order of sums over the inner axis of a matrix product
    "ATB_MATMUL_SHUFFLE_K_ENABLE": "0",  # the same in the library of transformer operators
}
# Ports of processes beside training on the same NPUs, whose HCCL has 60000 and 16666 by default.
SECOND_PORTS: Mapping[str, str] = {
    "HCCL_HOST_SOCKET_PORT_RANGE": "62000-62999",
    "HCCL_NPU_SOCKET_PORT_RANGE": "63000-63999",
}
IMPORT_S = 40.0  # time to import torch and torch_npu from a network file system
ANSWER = "devices: "
ASK = f"import torch, torch_npu; print({ANSWER!r} + str(torch_npu.npu.device_count()))"


def start(
    index: int, assigned: str | None, deadline_s: float | None, megatron: bool = True
) -> None:
    """Set up this process's NPU: select it, disable operator compilation, apply the adaptor.

    Call it before importing Megatron.

    Args:
        index: Index among the visible devices; used if `assigned` is None (torchrun).
        assigned: Host-wide device number from Ray.
        deadline_s: Longest wait for other ranks, for HCCL's timeouts; None = HCCL's own.
        megatron: Whether the process computes with Megatron, which needs MindSpeed.

    Raises:
        ValueError: Software is missing or incompatible, or the device is not visible.
    """
    # Looking up a version imports the namespace `megatron`, which holds nothing.
    early = sorted(name for name in sys.modules if name.startswith("megatron."))
    assert not early, f"{early[0]} was imported before MindSpeed's adaptor"
    check_cann(os.environ)
    for warning in npu_versions.require_versions() if megatron else ():
        logger.warning("%s", warning)
    if deadline_s is not None:
        set_timeouts(os.environ, deadline_s)
    npu = import_torch_npu().npu
    seen = int(npu.device_count())
    if assigned is not None:
        index = visible.index_within(assigned, VISIBLE, seen)
    npu.set_device(visible.check_index(index, VISIBLE, seen))
    npu.set_compile_mode(jit_compile=False)  # lengths vary: compiling for each would take minutes
    if megatron:
        _patch_megatron()


def check_cann(environment: Mapping[str, str]) -> None:
    """Raise ValueError unless CANN's set_env.sh was sourced and LIBRARY is found."""
    home = next((environment[name] for name in HOME if environment.get(name)), "")
    if not home or not Path(home).is_dir():
        raise ValueError(f"{' or '.join(HOME)} must be CANN's folder, not {home!r}; {SOURCE_IT}")
    folders = filter(None, environment.get("LD_LIBRARY_PATH", "").split(os.pathsep))
    if any(Path(folder, LIBRARY).exists() for folder in folders):
        return
    if ctypes.util.find_library("ascendcl") is None:
        raise ValueError(
            f"{LIBRARY} must be on LD_LIBRARY_PATH, it is in none of its folders; {SOURCE_IT}"
        )


def import_torch_npu() -> Any:
    """Import and return torch_npu; raise ValueError if `check_cann` or the import fails."""
    check_cann(os.environ)
    try:
        return importlib.import_module("torch_npu")
    except ImportError as error:
        raise ValueError(NOT_INSTALLED.format(error)) from error


def count_npus() -> int:
    """Return the number of NPUs listed by npu-smi, at most those in ASCEND_RT_VISIBLE_DEVICES.

    Does not import torch_npu, which takes seconds, cannot be undone, and may claim device memory.
    If npu-smi fails, torch_npu counts them in a separate process. Raises ValueError if CANN or
    torch_npu is missing, or both counts fail.
    """
    check_installed()
    view = driver.query_driver(DeviceKind.NPU)
    assert view is not None, "an NPU has a driver"
    if view.problem or not view.devices:
        problem = view.problem or f"{view.tool} lists no device"
        logger.info("%s: torch_npu counts the devices in a separate process", problem)
        return count_by_torch(problem)
    num_visible = len(visible.list_visible(VISIBLE)) or len(view.devices)
    return min(num_visible, len(view.devices))


def check_installed() -> None:
    """Raise ValueError if `check_cann` fails or torch_npu is not on the path; imports nothing."""
    check_cann(os.environ)
    if importlib.util.find_spec("torch_npu") is None:
        raise ValueError(NOT_INSTALLED.format("it is not on the path"))


def count_by_torch(reason: str = "") -> int:
    """Return the number of NPUs torch_npu sees in a separate process, or raise ValueError.

    `reason` says why npu-smi failed, for the error.
    """
    try:
        output = driver.run_tool([sys.executable, "-c", ASK], IMPORT_S)
        return int(output.rpartition(ANSWER)[2])
    except ValueError as problem:
        tool = f"{reason}, and " if reason else ""
        raise ValueError(
            f"the NPUs of this host must be counted, which failed: {tool}torch_npu in a separate "
            f"process: {problem}; put npu-smi on PATH, mount it and /dev/davinci* into the "
            "container, or correct what torch_npu reports"
        ) from None


def set_timeouts(environment: Any, deadline_s: float) -> None:
    """Set missing HCCL timeouts (CONNECT, EXECUTE, EVENT) in `environment`.

    They are at least `deadline_s`, within HCCL's limits: the run's own timeout should come first,
    since its error names the missing ranks. EVENT must exceed EXECUTE (0 = no limit), so if only
    one is set, the other follows it.
    """
    deadline = math.ceil(deadline_s)
    environment.setdefault(CONNECT, str(min(max(deadline, CONNECT_S[0]), CONNECT_S[1])))
    event = int(environment.get(EVENT) or 0)
    if environment.get(EXECUTE):
        execute = int(environment[EXECUTE])
    else:
        execute = min(deadline, event - 1) if event else deadline
    environment.setdefault(EXECUTE, str(execute))
    environment.setdefault(EVENT, str(max(EVENT_S, execute + EVENT_MARGIN_S) if execute else 0))


def communicator_mib(environment: Mapping[str, str]) -> int:
    """Return the device memory for one communicator, in MiB: twice HCCL_BUFFSIZE."""
    variable = environment.get("HCCL_BUFFSIZE", "")
    buffer_mib = int(variable) if variable.isdigit() else BUFFER_MIB
    return 2 * buffer_mib


def _patch_megatron() -> None:
    """Apply MindSpeed's patches with ARGUMENTS, and fix its fp64 all-reduce.

    Meanwhile sys.argv has only the program name, since MindSpeed would parse Ray's arguments. The
    root logger, modified by MindSpeed, gets its handlers and level back.
    """
    all_reduce = dist.all_reduce
    argv = sys.argv
    root = logging.getLogger()
    handlers = root.handlers[:]
    level = root.level
    sys.argv = [argv[0] if argv else "mindspeed_rlxf"]
    try:
        adaptor = importlib.import_module("mindspeed.megatron_adaptor")
        adaptor.repatch(dict(ARGUMENTS))
    finally:
        sys.argv = argv
        root.handlers[:] = handlers
        root.setLevel(level)
    dist.all_reduce = _reduce_fp64_in_place(dist.all_reduce, all_reduce)


def _reduce_fp64_in_place(patched: Callable[..., Any], plain: Callable[..., Any]) -> Any:
    """Return an all-reduce that reduces fp64 tensors in place and passes others to `patched`.

    MindSpeed's `patched` reduces an fp64 tensor's copy and loses the result. torch's `plain`
    reduces fp64 host tensors with gloo; HCCL has no fp64, so on the device an fp32 copy is reduced
    and copied back (not with `async_op`).
    """

    @wraps(plain)
    def all_reduce(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if tensor.dtype is not torch.double:
            return patched(tensor, *args, **kwargs)
        if tensor.device.type == "cpu":
            return plain(tensor, *args, **kwargs)
        assert not kwargs.pop("async_op", False), "fp64 on the device is reduced at once"
        narrow = tensor.float()
        plain(narrow, *args, **kwargs)
        tensor.copy_(narrow)
        return None

    return all_reduce


def attend_to_longer_keys(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    lengths: tuple[int, ...],
    key_lengths: tuple[int, ...],
) -> torch.Tensor:
    """Attend within packed sequences with more keys than queries, causal to the last key.

    Query and result are [tokens, heads, d], key and value [keys, groups, d]. Source:
    npu_fusion_attention in Ascend/op-plugin, layout TND with sparse_mode 3, whose mask is the
    compressed one and whose ends have no leading 0.
    """
    out: torch.Tensor = import_torch_npu().npu_fusion_attention(
        query,
        key,
        value,
        query.size(1),
        "TND",
        atten_mask=_compressed_mask(query.device),
        scale=query.size(2) ** -0.5,
        actual_seq_qlen=list(accumulate(lengths)),
        actual_seq_kvlen=list(accumulate(key_lengths)),
        sparse_mode=3,
    )[0]
    return out


def attend_to_cache(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, hidden: torch.Tensor
) -> torch.Tensor:
    """Attend from one token of each row to its keys that are not `hidden`; no gradient.

    Query and result are [rows, heads, 1, d], keys and values [rows, groups, capacity, d], `hidden`
    [rows, 1, 1, capacity] bool. Source: npu_fused_infer_attention_score in Ascend/op-plugin, layout
    BNSD, which takes a mask where the query has one token.
    """
    out: torch.Tensor = import_torch_npu().npu_fused_infer_attention_score(
        query,
        keys,
        values,
        atten_mask=hidden,
        num_heads=query.size(1),
        num_key_value_heads=keys.size(1),
        scale=query.size(-1) ** -0.5,
        input_layout="BNSD",
    )[0]
    return out


@cache
def _compressed_mask(where: torch.device) -> torch.Tensor:
    return torch.ones(2048, 2048, dtype=torch.bool, device=where).triu(1)
