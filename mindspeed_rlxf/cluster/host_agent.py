"""One agent per host: runs plain functions there, beside the workers. Free of Ray.

    sizes = call_each(hosts, disk_usage, folder, timeout_s=30.0)

Files, checks and diagnosis go through it, so that a role has no methods for them. It answers while
workers compute, hang or are dead. `ray.agent` has it for the hosts of a Ray cluster, `local` for
the processes that are there.
"""

from __future__ import annotations

import threading
import time
import traceback
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from queue import Empty, Queue
from typing import Any, Protocol

from mindspeed_rlxf.cluster.errors import HostError

Function = Callable[..., Any]


class HostCall(Protocol):
    """A function under way on a host."""

    def result(self) -> Any:
        """Wait for it. Raises HostError where it raised, was lost, or did not end in time."""


class HostAgent(ABC):
    """Runs functions on one host. host: its name, for messages"""

    def __init__(self, host: str) -> None:
        self.host = host

    @abstractmethod
    def start(self, function: Function, *args: Any, timeout_s: float) -> HostCall:
        """Start `function(*args)` on the host, without waiting.

        function:  of a module, so that it travels by name. A lost process is replaced once while
                   it runs: it may run twice
        args:      a HostCall stands for its result, which goes from host to host
        timeout_s: from now to its result
        """

    def call(self, function: Function, *args: Any, timeout_s: float) -> Any:
        """The result of `function(*args)` on the host. Raises HostError."""
        return self.start(function, *args, timeout_s=timeout_s).result()


def call_each(
    agents: Sequence[HostAgent], function: Function, *args: Any, timeout_s: float
) -> list[Any]:
    """Results of a function on several hosts at the same time. Raises the first HostError."""
    calls = [agent.start(function, *args, timeout_s=timeout_s) for agent in agents]
    return [call.result() for call in calls]


def outcomes(calls: Sequence[HostCall]) -> list[Any]:
    """The result of each call, or its HostError; waits for all of them."""
    return [_outcome(call) for call in calls]


def _outcome(call: HostCall) -> Any:
    try:
        return call.result()
    except HostError as error:
        return error


def late(host: str, function: Function, timeout_s: float, waits_for: str) -> HostError:
    """waits_for: what has not happened"""
    cause = f"no reply within {round(timeout_s, 1):g} s, waiting for {waits_for}"
    return HostError(host, function.__name__, cause, is_late=True)


class ThreadCall:
    """A function in a thread of this process, which ends with the process at the latest."""

    def __init__(self, host: str, function: Function, args: Sequence[Any], timeout_s: float):
        self._host, self._function, self._timeout_s = host, function, timeout_s
        self._deadline = time.monotonic() + timeout_s
        self._ended: Queue[tuple[Any, Exception | None]] = Queue()
        threading.Thread(target=self._run, args=args, daemon=True).start()

    def _run(self, *args: Any) -> None:
        try:
            self._ended.put((self._function(*args), None))
        except Exception as error:
            self._ended.put((None, error))

    def result(self) -> Any:
        try:
            value, error = self._ended.get(timeout=max(self._deadline - time.monotonic(), 0))
        except Empty:
            raise late(
                self._host, self._function, self._timeout_s, "the function to return"
            ) from None
        self._ended.put((value, error))  # for who asks again
        if error is None:
            return value
        text, cause = "".join(traceback.format_exception(error)), f"{type(error).__name__}: {error}"
        raise HostError(self._host, self._function.__name__, cause, text) from error
