"""Checks the nodes of a joined cluster before devices are claimed. Free of Ray."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from pathlib import Path

from mindspeed_rlxf.cluster.errors import HostError
from mindspeed_rlxf.cluster.host_agent import HostAgent, outcomes
from mindspeed_rlxf.cluster.installed import build
from mindspeed_rlxf.cluster.node_report import NodeReport, problems, report
from mindspeed_rlxf.cluster.nodes import Node
from mindspeed_rlxf.config.enums import DeviceKind
from mindspeed_rlxf.config.errors import Problem, UserError

logger = logging.getLogger(__name__)


class NodeCheck:
    """Compares the nodes of a joined cluster with the driver's; each node once."""

    def __init__(
        self,
        agent_on: Callable[[str, str], HostAgent],
        keys: Mapping[str, str],
        run_file: Path | None,
        timeout_s: float,
        probe: DeviceKind | None = None,
    ) -> None:
        """agent_on: gives the agent of a node, by id and host
        keys:     folder that workers read -> the configuration keys that name it
        run_file: that the driver has written, to learn which nodes share its run directory
        probe:    leave out the nodes that do not answer, differ, or have sick devices of this kind;
                  None = refuse them
        """
        self._agent_on, self._keys = agent_on, dict(keys)
        self._timeout_s, self._probe = timeout_s, probe
        self.left_out: set[str] = set()  # ids of nodes
        self._run_file = str(run_file) if run_file is not None else None
        self._driver: NodeReport | None = None
        self._seen: dict[str, NodeReport] = {}

    def check(self, nodes: list[Node]) -> list[Node]:
        """The nodes that may be used.

        Raises UserError that names those whose software or files differ, unless they are left out.
        """
        new = [node for node in nodes if node.id not in {*self._seen, *self.left_out}]
        if new:
            self._driver = self._driver or report(list(self._keys), self._run_file)
            reports, silent = self._collect(new)
            self._seen.update(reports)
            self._judge(new, reports, silent)
        return [node for node in nodes if node.id not in self.left_out]

    def _judge(
        self, nodes: list[Node], reports: Mapping[str, NodeReport], silent: Mapping[str, str]
    ) -> None:
        assert self._driver is not None, "asked first"
        if self._probe is None:
            wrong = list(silent.values())
            wrong += problems(self._driver, list(reports.values()), self._keys)
            if wrong:
                raise UserError([Problem("", text) for text in wrong])
            return
        for node in nodes:
            found = [silent[node.id]] if node.id in silent else self._faults(node, reports[node.id])
            if found:
                self.left_out.add(node.id)
                logger.warning("%s (%s) is left out: %s", node.host, node.ip, "; ".join(found))

    def _faults(self, node: Node, seen: NodeReport) -> list[str]:
        assert self._driver is not None, "asked first"
        found = [*seen.sick, *problems(self._driver, [seen], self._keys)]
        if seen.devices is not None and seen.devices < node.count:
            found.append(f"its driver lists {seen.devices} of {node.count} devices")
        return found

    def say_what_is_not_shared(self, hosts: set[str]) -> None:
        """Name the hosts in use whose output does not arrive where the driver's does."""
        apart = sorted({r.host for r in self._seen.values() if not r.sees_run} & hosts)
        if apart:
            logger.warning(
                "training.output_dir is not shared with %s: logs of their ranks, and weights that "
                "they write, stay on these hosts below the same path",
                ", ".join(apart),
            )

    def _collect(self, nodes: list[Node]) -> tuple[dict[str, NodeReport], dict[str, str]]:
        """By node: reports, and what to say of those that gave none."""
        arguments = list(self._keys), self._run_file, self._probe
        calls = [
            self._agent_on(node.id, node.host).start(report, *arguments, timeout_s=self._timeout_s)
            for node in nodes
        ]
        found, silent = {}, {}
        for node, reply in zip(nodes, outcomes(calls), strict=True):
            if isinstance(reply, HostError):  # an import that fails there, or the node went away
                silent[node.id] = _silent(node, reply.cause)
            else:
                found[node.id] = reply
        return found, silent


def _silent(node: Node, what: str) -> str:
    return (
        f"mindspeed_rlxf on {node.host} ({node.ip}) must be that of the driver ({build()}): "
        f"{what}; install the same there, and start Ray on that host from that environment again"
    )
