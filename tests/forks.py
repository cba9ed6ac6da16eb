"""A process that has imported everything, and forks of it in the place of new processes.

Imports take some seconds, a fork takes milliseconds. The processes of pytest-xdist share one
server, which ends with the last of them.

python -m tests.forks SOCKET
"""

import contextlib
import ctypes
import fcntl
import gc
import importlib
import os
import runpy
import signal
import socket
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from multiprocessing.connection import Client, Connection, wait
from pathlib import Path
from typing import Any

from tests.processes import ROOT, with_sources

START_S = 120.0
RUN_S = 600.0
LEASE = "lease"  # a connection that only keeps the server alive
DIE_WITH_PARENT = 1  # PR_SET_PDEATHSIG
PLAIN = (
    "pytest",
    "peft",
    "tests.distributed.forked",
    "tests.distributed.fsdp_models",
    "tests.distributed.samples",
    "tests.training",
    "mindspeed_rlxf.cli.train",
    "mindspeed_rlxf.engine.fsdp.engine",
    "mindspeed_rlxf.roles.all_roles",
)
MEGATRON = ("mindspeed_rlxf.engine.engine", "mindspeed_rlxf.rollout.native")
MEGATRON_SUFFIX = ".megatron"  # of the socket where forks with Megatron are asked for
Task = Callable[..., Any]  # gets the connection and the arguments


class Forks:
    """The server's side of the tests: connects to it, or starts it first."""

    def __init__(self, folder: Path) -> None:
        """folder: the same in every process that shares the server; a short path"""
        self._socket = str(folder / "forks")
        with open(folder / "forks.lock", "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not os.path.exists(self._socket):
                with open(folder / "forks.log", "wb") as log:
                    server = subprocess.Popen(
                        [sys.executable, "-m", "tests.forks", self._socket],
                        cwd=ROOT, env=with_sources(), stdin=subprocess.DEVNULL, stdout=log,
                        stderr=log, start_new_session=True,
                    )  # fmt: skip
                self._wait_for(self._socket, server)
            self._lease = Client(self._socket, "AF_UNIX")
            self._lease.send((LEASE, ()))

    def _wait_for(self, path: str, server: subprocess.Popen[bytes] | None = None) -> None:
        deadline = time.monotonic() + START_S
        while not os.path.exists(path):
            ended = server is not None and server.poll() is not None
            log = Path(self._socket + ".log")
            assert not ended and time.monotonic() < deadline, log.read_text(encoding="utf-8")
            time.sleep(0.05)

    def start(self, task: Task, *arguments: Any, megatron: bool) -> Connection:
        """Call a function of a module in a fork; return the other end of its first argument."""
        path = self._socket + MEGATRON_SUFFIX * megatron
        self._wait_for(path)
        connection = Client(path, "AF_UNIX")
        connection.send((task, arguments))
        return connection

    def run(
        self, module: str, *words: object, megatron: bool = False, folder: Path = ROOT, **more: str
    ) -> str:
        """Do `python -m module words` in a fork; return all that it printed. more: environment

        module: or the path of a script.
        Fails the test for an exit code other than 0.
        """
        arguments = module, [str(word) for word in words], str(folder), with_sources(**more)
        with self.start(run_module, *arguments, megatron=megatron) as connection:
            code, output = receive(connection)
        assert code == 0, output
        return output

    def end(self) -> None:
        """Close the lease."""
        self._lease.close()


def receive(connection: Connection) -> Any:
    """Return what a fork sends; fail the test if that takes RUN_S."""
    assert connection.poll(RUN_S), f"a fork has sent nothing for {RUN_S:g} s"
    return connection.recv()


def run_module(
    connection: Connection,
    module: str,
    words: Sequence[str],
    folder: str,
    environment: Mapping[str, str],
) -> None:
    """Run a module as a program, and send its exit code and its output."""
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(folder)
    file = os.memfd_create("output")
    os.dup2(file, 1)
    os.dup2(file, 2)
    sys.argv = [module, *words]
    code: Any = 0
    try:
        if module.endswith(".py"):
            runpy.run_path(module, run_name="__main__")
        else:
            runpy.run_module(module, run_name="__main__", alter_sys=True)
    except SystemExit as ended:
        code = ended.code or 0
    except BaseException:
        traceback.print_exc()
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    size = os.fstat(file).st_size
    connection.send((code, os.pread(file, size, 0).decode("utf-8", "replace")))


def serve(path: str, megatron: bool = False) -> None:
    """Fork for each connection; return when the last lease has ended.

    Megatron's forks are forks of a fork, because its adaptor changes torch.
    """
    if megatron:
        from mindspeed_rlxf import device
        from mindspeed_rlxf.config.enums import DeviceKind

        device.setup(DeviceKind.CPU)
    for module in MEGATRON if megatron else PLAIN:
        importlib.import_module(module)
    if not megatron:
        from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

        list(MODEL_FOR_CAUSAL_LM_MAPPING)  # imports what each fork would
        loaded = [name for name in sys.modules if name.startswith("megatron.")]
        assert not loaded, f"{loaded[0]} was imported"  # by the driver's modules, or FSDP's
    if not megatron and fork():
        serve(path + MEGATRON_SUFFIX, megatron=True)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # leaves no zombies
    gc.freeze()
    leases: list[Connection] = []
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(f"{path}.new")
        listener.listen(64)
        os.rename(f"{path}.new", path)  # whoever sees it can connect
        while True:
            for ready in wait([listener, *leases]):
                if ready is not listener:
                    leases = [lease for lease in leases if lease is not ready]
                    if not leases:
                        os.unlink(path)
                        Path(path + MEGATRON_SUFFIX).unlink(missing_ok=True)
                        return
                    continue
                connection = Connection(listener.accept()[0].detach())
                task, arguments = connection.recv()
                if task == LEASE:
                    leases.append(connection)
                    continue
                if fork():
                    work(task, connection, arguments)
                connection.close()


def fork() -> bool:
    """Fork; return whether this is the new process, which ends with its parent."""
    if os.fork():
        return False
    ctypes.CDLL(None).prctl(DIE_WITH_PARENT, signal.SIGKILL)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    return True


def work(task: Task, connection: Connection, arguments: Sequence[Any]) -> None:
    """Do the task of a fork, and end it."""
    try:
        with contextlib.suppress(EOFError):  # the test has ended
            task(connection, *arguments)
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(0)


if __name__ == "__main__":
    serve(sys.argv[1])
