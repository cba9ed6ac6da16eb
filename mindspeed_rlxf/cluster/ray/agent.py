"""The nodes of a Ray cluster, and an agent on each: a process that reserves no device or CPU."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayError, RayTaskError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from mindspeed_rlxf.cluster.errors import HostError
from mindspeed_rlxf.cluster.host_agent import Function, HostAgent, deadline_error
from mindspeed_rlxf.cluster.nodes import Node, make_node, sort_by_address
from mindspeed_rlxf.cluster.ray.wait import describe_end

FETCH_S = 10.0  # least time for the transfer of a result that is ready
# Several calls at the same time, so that diagnosis does not wait for a long call of files.
RESTARTED = {"max_restarts": -1, "max_task_retries": 1, "max_concurrency": 8}


def live_nodes(resource: str) -> list[Node]:
    """List the nodes that are alive, also those without devices, sorted by address.

    Hosts of equal names get a part of their node id: `node1/3f2a91`.
    resource: Ray's name of a device
    """
    free = ray._private.state.available_resources_per_node()
    alive = [facts for facts in ray.nodes() if facts["Alive"]]
    hosts = Counter(facts["NodeManagerHostname"] for facts in alive)
    found = []
    for facts in alive:
        host, totals = facts["NodeManagerHostname"], facts["Resources"]
        name = host if hosts[host] == 1 else f"{host}/{facts['NodeID'][:6]}"
        available = free.get(facts["NodeID"], totals).get(resource, 0)
        named = {**facts, "NodeManagerHostname": name}
        found.append(make_node(named, resource, totals, available))
    return sort_by_address(found)


class Caller:
    """The actor class of an agent."""

    def call(self, function: Function, *args: Any) -> Any:
        """Return `function(*args)`."""
        return function(*args)


class RayAgent(HostAgent):
    """Runs functions in a process on one node; the first call starts it."""

    def __init__(self, node: str, host: str, **options: Any) -> None:
        """Store where and how the process is to run; none is started yet.

        node: Ray's id of the node; options: of the Ray actor
        """
        super().__init__(host)
        self._node, self._options = node, options
        self._actor: Any = None

    def open(self) -> None:
        """Start the agent's process if there is none, without waiting for it."""
        if self._actor is None:
            where = NodeAffinitySchedulingStrategy(self._node, soft=False)
            made = ray.remote(Caller).options(scheduling_strategy=where, **self._options)
            self._actor = made.remote()
            self.answer = self._actor.call.remote(time.time)

    def start(self, function: Function, *args: Any, timeout_s: float) -> RayHostCall:
        """Start a function on the host, and first its process if there is none, without waiting.

        args:      a RayHostCall among them is replaced by its result
        timeout_s: deadline of the result, seconds from now
        """
        self.open()
        given = [arg.ref if isinstance(arg, RayHostCall) else arg for arg in args]
        inputs = [arg for arg in args if isinstance(arg, RayHostCall)]
        ref = self._actor.call.remote(function, *given)
        return RayHostCall(self, function, ref, timeout_s, inputs)

    def end(self) -> None:
        """Kill the process, if it was started, with its calls; the next call starts a new one."""
        if self._actor is not None:
            ray.kill(self._actor)
        self._actor = None


class RayHostCall:
    """Implements `HostCall`."""

    def __init__(
        self,
        agent: RayAgent,
        function: Function,
        ref: Any,
        timeout_s: float,
        inputs: Sequence[RayHostCall],
    ) -> None:
        """Describe a call that has been started; its deadline is `timeout_s` from now.

        ref: Ray's reference to the result; inputs: calls whose results are its arguments
        """
        self.ref = ref
        self._agent, self._function, self._inputs = agent, function, inputs
        self._timeout_s, self._deadline = timeout_s, time.monotonic() + timeout_s

    def result(self) -> Any:
        """Wait for the result and return it.

        Raises HostError where the function failed, its host died, or it is late. If an input
        failed, its HostError is raised. The transfer of a result that is ready may take FETCH_S,
        also beyond the deadline.
        """
        host, name = self._agent.host, self._function.__name__
        left = max(self._deadline - time.monotonic(), 0)
        if not ray.wait([self.ref], timeout=left, fetch_local=False)[0]:
            is_there = ray.wait([self._agent.answer], timeout=0, fetch_local=False)[0]
            waits_for = "the function to return" if is_there else "the process of its agent"
            raise deadline_error(host, self._function, self._timeout_s, waits_for)
        try:
            left = self._deadline - time.monotonic()
            return ray.get(self.ref, timeout=max(left, FETCH_S))
        except GetTimeoutError:
            raise deadline_error(
                host, self._function, self._timeout_s, "its result to arrive"
            ) from None
        except RayError as error:
            for call in self._inputs:  # its own failure, if there was one, is the cause
                call.result()
            raised = error.cause if isinstance(error, RayTaskError) else None
            raise HostError(host, name, describe_end(error), str(error)) from raised


class RayAgents:
    """Makes the agents of a run's nodes, one for each."""

    def __init__(self, environment: Mapping[str, str] | None = None) -> None:
        """Start without agents. environment: variables to set in the agents' processes"""
        self._environment = environment or {}
        self._by_node: dict[str, RayAgent] = {}

    def on(self, node: str, host: str) -> RayAgent:
        """Return the agent of a node, the same for each call; its first request starts the process.

        node: Ray's id; host: its name. Ray restarts an agent that dies.
        """
        options = device_options(None, self._environment) | RESTARTED
        return self._by_node.setdefault(node, RayAgent(node, host, **options))

    def end(self, but: Sequence[HostAgent] = ()) -> None:
        """Kill the actor process of each agent, except the agents in `but`."""
        for agent in set(self._by_node.values()).difference(but):
            agent.end()


def device_options(resource: str | None, environment: Mapping[str, str]) -> dict[str, Any]:
    """Return the options of a Ray actor with one device of `resource`; None = no device.

    The actor takes no CPUs and is not restarted.
    environment: variables of its process, without secrets: Ray shows and logs them
    """
    options: dict[str, Any] = {"num_cpus": 0, "max_restarts": 0}
    if resource == "GPU":
        options["num_gpus"] = 1
    elif resource is not None:
        options["resources"] = {resource: 1}
    if environment:
        options["runtime_env"] = {"env_vars": dict(environment)}
    return options
