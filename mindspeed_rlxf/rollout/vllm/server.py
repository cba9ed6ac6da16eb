"""Start, watch and end a vLLM server process."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
import uuid
import weakref
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from mindspeed_rlxf.config.lora import LORA_RANKS, linear_modules
from mindspeed_rlxf.config.schema import ActorConfig, RunConfig
from mindspeed_rlxf.rollout import bit_sums
from mindspeed_rlxf.rollout.vllm.client import Client, ServerError
from mindspeed_rlxf.rollout.vllm.engine_side.rlxf_serve import kill_group

ENGINE_SIDE = Path(__file__).with_name("engine_side")
HIDDEN = (  # about the trainer's own process
    "PYTHONPATH", "PYTHONHOME", "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE",
    "MASTER_ADDR", "MASTER_PORT", "GROUP_RANK", "TORCH_DEVICE_BACKEND_AUTOLOAD",
    # vllm-ascend refuses expandable segments while its memory can sleep.
    "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_NPU_ALLOC_CONF", "PYTORCH_ALLOC_CONF",
)  # fmt: skip
SWITCHES = (  # the options of vLLM that are off by default and have no form `--no-NAME`
    "disable-log-stats", "aggregate-engine-logging", "data-parallel-multi-port-external-lb",
)  # fmt: skip
PREFIX, SOCKET_BYTES = "rlxf-vllm-", 107  # of folders of sockets; the longest path of a socket
LOG_PREFIX = re.compile(r"^(?:\([^)]*pid=\d+\) )?(?:ERROR [^\]]*\] )?")  # of lines in vLLM's log
ERRORS = "ValueError|ValidationError|NotImplementedError|ImportError|ModuleNotFoundError"
MISTAKE = re.compile(  # a line that says what is wrong with the options or the environment
    rf"{LOG_PREFIX.pattern}((?:[\w.]*(?:{ERRORS})|[\w.]+: error): .*)$"
)
TAIL_LINES, END_S = 20, 10.0  # lines of a log in errors; seconds for a server to end by itself


class OptionsRefused(ValueError):
    """The server does not start with this configuration, in this environment."""


class Server:
    """A vLLM server in its own process group, reached by a socket that only this user can open.

    It ends with this object, with `end`, and when this process ends in any way.
    """

    def __init__(
        self, python: str, options: Sequence[str], environment: Mapping[str, str], log: Path
    ) -> None:
        """Start the process without waiting for it; its output is appended to `log`."""
        folder = _make_socket_folder()
        tells_versions = environment["RLXF_TRANSPORT"] != "npu_ipc"  # which is vLLM 0.23
        self.client, self.log = Client(str(folder / "api"), tells_versions), log
        own = {
            "PYTHONPATH": str(ENGINE_SIDE),
            "RLXF_FOLDER": str(folder),
            "RLXF_BIT_SUMS": bit_sums.__file__,
            "VLLM_RPC_BASE_PATH": str(folder),
            "VLLM_SERVER_DEV_MODE": "1",  # has the routes for weights
            "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1",  # has those for adapters
            "VLLM_HOST_IP": "127.0.0.1",
            "VLLM_NO_USAGE_STATS": "1",
            "VLLM_ALLOW_LONG_MAX_MODEL_LEN": "1",
            "HF_HUB_OFFLINE": "1",
        }
        kept = {name: text for name, text in os.environ.items() if name not in HIDDEN}
        command = [python, str(ENGINE_SIDE / "rlxf_serve.py"), str(os.getpid()), *options]
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("ab") as output:
            self._start = output.tell()
            self.process = subprocess.Popen(
                [*command, "--uds", self.client.path],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env={**kept, **own, **environment},
                start_new_session=True,
            )
        self.end = weakref.finalize(self, _end, self.process, folder)

    def wait_until_ready(self, timeout_s: float) -> None:
        """Wait until the server answers. Raises ServerError if it ends, or takes too long."""
        deadline = time.monotonic() + timeout_s
        while not self.client.is_ready():
            if (status := self.process.poll()) is not None:
                raise ServerError(f"it ended at its start with status {status}")
            if time.monotonic() > deadline:
                raise ServerError(f"it was not ready after {timeout_s:g} s")
            time.sleep(0.2)

    def last_lines(self) -> str:
        """Return the end of what this process has written."""
        return "\n".join([f"last lines of {self.log}:", *self._lines()[-TAIL_LINES:]])

    def find_mistake(self) -> str:
        """Return what a server that has ended by itself says of its configuration; else ""."""
        if (self.process.poll() or 0) <= 0:
            return ""
        lines = self._lines()
        for number, line in enumerate(lines):
            found = MISTAKE.match(line)
            if found is not None:
                is_head = "ValidationError" in found[1]  # the next line has the reason
                reason = lines[number + 1 : number + 2] if is_head else []
                return " ".join([found[1], *(LOG_PREFIX.sub("", text).strip() for text in reason)])
        return ""

    def _lines(self) -> list[str]:
        """Return what this process has written."""
        return self.log.read_bytes()[self._start :].decode("utf-8", "replace").splitlines()


def _make_socket_folder() -> Path:
    """Make a folder for this user's sockets, with a path that is short enough for them."""
    root = tempfile.gettempdir()
    longest = Path(root, f"{PREFIX}12345678", str(uuid.uuid4()))  # vLLM's names of sockets
    if len(os.fsencode(longest)) > SOCKET_BYTES:
        root = "/tmp"
    return Path(tempfile.mkdtemp(prefix=PREFIX, dir=root))


def _end(process: subprocess.Popen[bytes], folder: Path) -> None:
    process.terminate()
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(END_S)
    kill_group(process.pid)
    process.wait()
    shutil.rmtree(folder, ignore_errors=True)


def lora_options(actor: ActorConfig) -> dict[str, Any]:
    """Return the options of a server whose linears compute adapters."""
    options: dict[str, Any] = {
        "enable-lora": True,
        "max-lora-rank": min(rank for rank in LORA_RANKS if rank >= actor.lora.rank),
    }
    if actor.backend == "megatron":  # whose engine adapts these modules alone
        modules = filter(actor.lora.selects, linear_modules(actor.architecture))
        options["lora-target-modules"] = sorted({name.rpartition(".")[2] for name in modules})
    return options


def server_command(
    config: RunConfig, max_rows: int, on_cpu: bool, on_npu: bool, seed: int | None = None
) -> tuple[str, list[str]]:
    """Return the interpreter and the server's options; those of `extra_args` win.

    Args:
        config: The run.
        max_rows: Most requests that the server computes at once.
        on_cpu: Whether it computes on CPU.
        on_npu: Whether it computes on NPUs.
        seed: Of the server; None = the run's.
    """
    actor, keys, tp = config.actor_rollout, config.rollout.vllm, config.rollout_tp
    # At temperature 1 raw log-probs are those before filters and the ban on an early EOS.
    mode = "raw_logprobs" if actor.logit_temperature == 1.0 else "processed_logprobs"
    options: dict[str, Any] = {
        "model": actor.load,
        "load-format": "dummy",  # all weights are sent
        "skip-tokenizer-init": True,
        "generation-config": "vllm",
        "dtype": "bfloat16" if actor.bf16 else "float32",
        "seed": config.training.seed if seed is None else seed,
        "max-model-len": config.training.seq_length + 1,  # scoring samples one token more
        "logprobs-mode": mode,
        "tensor-parallel-size": tp,
        "gpu-memory-utilization": keys.gpu_memory_utilization,
        "enforce-eager": keys.enforce_eager,
        "enable-sleep-mode": not on_cpu,
        "enable-prompt-tokens-details": True,
        "disable-log-stats": True,
        "disable-uvicorn-access-log": True,
        "stream-interval": 16,  # tokens sent together
        "worker-extension-cls": "rlxf_vllm.Extension",
        "weight-transfer-config": {"backend": "rlxf"},
    }
    if actor.has_fp32_logits:
        options["hf-overrides"] = {"head_dtype": "float32"}
    if actor.lora.rank:
        options |= lora_options(actor)
    if not on_cpu or keys.max_num_seqs or actor.num_samples_per_step:
        options["max-num-seqs"] = max_rows
    if keys.kv_cache_gib or on_cpu:
        options["kv-cache-memory-bytes"] = int((keys.kv_cache_gib or 1.0) * 2**30)
    if tp == 1:
        options["distributed-executor-backend"] = "uni"  # one process less
    if on_npu:
        options["additional-config"] = {"weight_nz_mode": 0}  # weights in NZ cannot be updated
    given_options = {name.replace("_", "-"): value for name, value in keys.extra_args.items()}
    overrides = given_options.get("hf-overrides")
    if isinstance(overrides, dict):  # beside the head's
        given_options["hf-overrides"] = options.get("hf-overrides", {}) | overrides
    options |= given_options
    words = list[str]()
    for name, value in options.items():
        if value is True:
            words.append(f"--{name}")
        elif value is False and name not in SWITCHES:
            words.append(f"--no-{name}")  # some options are on by default
        elif value is not False:
            text = json.dumps(value) if isinstance(value, (dict, list)) else str(value)
            words += [f"--{name}", *(value if name == "lora-target-modules" else [text])]
    return keys.python or sys.executable, words
