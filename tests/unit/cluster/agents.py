"""A host agent for tests without Ray."""

from __future__ import annotations

from typing import Any

from mindspeed_rlxf.cluster.host_agent import Function, HostAgent, HostCall, ThreadCall


class InProcess(HostAgent):
    """Runs functions in threads of the test process."""

    def start(self, function: Function, *args: Any, timeout_s: float) -> HostCall:
        given = [arg.result() if isinstance(arg, ThreadCall) else arg for arg in args]
        return ThreadCall(self.host, function, given, timeout_s)
