"""Run vLLM's own server, in the environment that has vLLM: `rlxf_serve.py OWNER OPTION...`."""

import contextlib
import os
import runpy
import shutil
import signal
import sys
import threading
import time

TRIED = ("0.32.", "0.23.")  # versions; 0.23 only as text, with vllm-ascend 0.23


def kill_group(group: int) -> None:
    """Kill a process group, this process last.

    Python's resource tracker ends by itself then, and removes their shared memory.
    """
    for name in sorted(os.listdir("/proc"), key=str(os.getpid()).__eq__):
        with contextlib.suppress(OSError, ValueError), open(f"/proc/{name}/cmdline", "rb") as file:
            if os.getpgid(int(name)) == group and b"resource_tracker" not in file.read():
                os.kill(int(name), signal.SIGKILL)


def end_with(parent: int) -> None:
    """Kill this process group, and remove its folder of sockets, once the parent has ended."""

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(0.5)
        shutil.rmtree(os.environ["RLXF_FOLDER"], ignore_errors=True)
        kill_group(os.getpgrp())

    threading.Thread(target=watch, daemon=True).start()


def main() -> None:
    """Check vLLM's version, then become its server."""
    end_with(int(sys.argv[1]))
    import vllm

    if not vllm.__version__.startswith(TRIED):
        sys.exit(
            f"rlxf_serve.py: error: vLLM must be {' or '.join(TRIED)}*, not {vllm.__version__}"
        )
    del sys.argv[1]
    if not vllm.__version__.startswith("0.23."):  # which always has the routes
        sys.argv.append("--enable-scale-out")
    runpy.run_module("vllm.entrypoints.openai.api_server", run_name="__main__")


if __name__ == "__main__":
    main()
