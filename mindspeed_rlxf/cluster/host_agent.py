"""One agent per host runs plain functions there, beside the workers. Free of Ray.

    sizes = call_each(hosts, disk_usage, folder, timeout_s=30.0)

Files, checks and diagnosis go through agents, so that roles have no methods for them. `ray.agent`
has the agents of a Ray cluster, which answer while workers compute, hang or are dead; `local` has
those of the processes of torchrun, which all have to make the same calls.
"""

from __future__ import annotations

import threading
import time
import traceback
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from typing import Any, Protocol

from mindspeed_rlxf.cluster.errors import HostError

Function = Callable[..., Any]


class HostCall(Protocol):
    """A function that was started on a host."""

    def result(self) -> Any:
        """Wait for the result and return it.

        Raises HostError where the function raised, its process was lost, or it is late.
        """


class HostAgent(ABC):
    """Runs functions on one host. host: its name, for messages"""

    def __init__(self, host: str) -> None:
        self.host = host

    @abstractmethod
    def start(self, function: Function, *args: Any, timeout_s: float) -> HostCall:
        """Start `function(*args)` on the host, on Ray without waiting.

        A local agent first waits for all ranks and for the calls in `args`.
        function:  a module-level function, which is sent by name. If the process of an agent of
                   `RayAgents` dies, it runs once more in a new one
        args:      a HostCall among them is replaced by its result, sent from host to host
        timeout_s: deadline of the result, in seconds from the start
        """

    def call(self, function: Function, *args: Any, timeout_s: float) -> Any:
        """Run `function(*args)` on the host, wait and return its result. Raises HostError.

        See `start` for the arguments.
        """
        return self.start(function, *args, timeout_s=timeout_s).result()


def call_each(
    agents: Sequence[HostAgent], function: Function, *args: Any, timeout_s: float
) -> list[Any]:
    """Call a function on several hosts at the same time and wait; return the results in order.

    Raises the HostError of the first host, in the order of `agents`, that failed; calls of later
    hosts go on, and nobody waits for them.
    """
    calls = [agent.start(function, *args, timeout_s=timeout_s) for agent in agents]
    return [call.result() for call in calls]


def collect_outcomes(calls: Sequence[HostCall]) -> list[Any]:
    """Wait for all calls; return, in order, the result of each or its HostError (not raised)."""
    found: list[Any] = []
    for call in calls:
        try:
            found.append(call.result())
        except HostError as error:
            found.append(error)
    return found


def deadline_error(host: str, function: Function, timeout_s: float, waits_for: str) -> HostError:
    """Return the HostError of a call that reached its deadline. waits_for: for the message"""
    cause = f"no reply within {round(timeout_s, 1):g} s, waiting for {waits_for}"
    return HostError(host, function.__name__, cause, is_late=True)


class ThreadCall:
    """Runs a function in a daemon thread of this process; implements `HostCall`."""

    def __init__(self, host: str, function: Function, args: Sequence[Any], timeout_s: float):
        self._host, self._function, self._timeout_s = host, function, timeout_s
        self._deadline = time.monotonic() + timeout_s
        self._future: Future[Any] = Future()
        threading.Thread(target=self._run, args=args, daemon=True).start()

    def _run(self, *args: Any) -> None:
        """Run the function and keep its result or its exception."""
        try:
            self._future.set_result(self._function(*args))
        except Exception as error:
            self._future.set_exception(error)

    def result(self) -> Any:
        """Wait for the function and return its result; raise HostError if it failed or is late."""
        if not wait([self._future], max(self._deadline - time.monotonic(), 0)).done:
            waits_for = "the function to return"
            raise deadline_error(self._host, self._function, self._timeout_s, waits_for)
        error = self._future.exception()
        if error is None:
            return self._future.result()
        text, cause = "".join(traceback.format_exception(error)), f"{type(error).__name__}: {error}"
        raise HostError(self._host, self._function.__name__, cause, text) from error
