"""Simulate hosts by Linux namespaces: each has its own address, name, processes and one own folder.

The namespaces exist only as long as their processes. The first process of a host ends when its
standard input is closed, so nothing is left when a test is killed.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tests.processes import ROOT, start_logged

TOOLS = ("ip", "unshare", "nsenter", "mount")
NETWORK = "10.77.0"
TOKEN = "00112233" * 8  # token of Ray, the same on all hosts
START_S = 30.0
# The name of a host resolves to a loopback address on the host itself, as on Debian: a program that
# publishes this address cannot be reached by the other hosts.
INIT = """
set -e
hostname "$NAME"
printf '127.0.0.1 localhost\\n127.0.1.1 %s\\n' "$NAME" > "$OWN/hosts"
echo 'nameserver 127.0.0.1' > "$OWN/resolv.conf"  # nobody answers, at once
mount --bind "$OWN/hosts" /etc/hosts
mount --bind "$OWN/resolv.conf" /etc/resolv.conf
mount --bind "$OWN" "$DATA"
ip link set lo up
echo ready
cat > /dev/null
"""


def find_obstacle() -> str | None:
    """Return why this machine cannot simulate hosts; None when it can."""
    lacking = [tool for tool in TOOLS if shutil.which(tool) is None]
    if lacking:
        return f"make test-hosts needs {', '.join(lacking)}; install iproute2 and util-linux"
    if os.getuid() != 0:
        return "make test-hosts needs root, for network namespaces; run it as root"
    made = subprocess.run(
        ["unshare", "--net", "--mount", "--uts", "--pid", "--fork", "true"], capture_output=True
    )
    if made.returncode:
        return (
            "make test-hosts may not make namespaces here; start the container with "
            f"--cap-add=SYS_ADMIN --cap-add=NET_ADMIN ({made.stderr.decode().strip()})"
        )
    return None


@dataclass
class Host:
    """One simulated host. All hosts share the file system but for the folder `data`."""

    name: str
    ip: str
    own: Path  # folder that is mounted as `data` on this host; visible to all hosts
    data: Path  # same path on all hosts, other files on each
    init: subprocess.Popen[str]
    children: list[subprocess.Popen[bytes]] = field(default_factory=list)

    @property
    def pid(self) -> int:
        # the only child of `unshare`
        children = Path(f"/proc/{self.init.pid}/task/{self.init.pid}/children").read_text()
        return int(children.split()[0])

    def start(
        self, command: Sequence[str], output: Path, **variables: str
    ) -> subprocess.Popen[bytes]:
        """Start a command on this host; append its output to a file. variables: environment"""
        inside = ["nsenter", "-t", str(self.pid), "--net", "--mount", "--uts", "--pid"]
        inside += ["env", "-C", str(ROOT)]
        environment = {
            **{k: v for k, v in os.environ.items() if not k.startswith(("RAY_", "GLOO_"))},
            "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", "PYTHONPATH": str(ROOT),
            "RAY_TMPDIR": str(self.data / "r"), "RAY_USAGE_STATS_ENABLED": "0",
            "RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": TOKEN, "OMP_NUM_THREADS": "1", **variables,
        }  # fmt: skip
        self.children.append(start_logged([*inside, *command], output, environment))
        return self.children[-1]

    def run(
        self, command: Sequence[str], output: Path, timeout_s: float = 240.0, code: int = 0
    ) -> str:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.start(command, output).wait(timeout=timeout_s)
        text, found = output.read_text(encoding="utf-8"), self.children[-1].returncode
        assert found == code, f"{' '.join(command)} on {self.name} ended with {found}:\n{text}"
        return text

    def start_ray(self, output: Path, devices: int, head: Host | None = None) -> None:
        """Run `ray start` as users write it. head: host to join, None = start the head here"""
        where = [f"--address={head.ip}:6344"] if head else ["--head", "--port", "6344"]
        resources = json.dumps({"rlxf_cpu": devices} if devices else {})
        own = ["--include-dashboard=false"] if head is None else []
        self.run(
            ["ray", "start", *where, *own, "--num-cpus=1", f"--resources={resources}",
             "--object-store-memory=100000000", "--disable-usage-stats"],
            output,
        )  # fmt: skip

    def stop_ray(self, output: Path) -> None:
        self.run(["ray", "stop", "--force"], output)

    def end(self) -> None:
        """End every process of the host: with its first process the kernel kills all others."""
        if self.init.stdin is not None:
            self.init.stdin.close()
        try:
            self.init.wait(timeout=10)
        except subprocess.TimeoutExpired:
            self.init.kill()
            self.init.wait()
        for child in self.children:
            child.kill()
            child.wait()


@contextlib.contextmanager
def make_hosts(count: int) -> Iterator[tuple[list[Host], Path]]:
    """Yield hosts node1, node2, ... at 10.77.0.1, .2, ... on one network, and a shared folder.

    Ends all hosts and removes their files after the block.
    """
    # A short path, because those of Ray's sockets below it may have 107 characters at most.
    base = Path(tempfile.mkdtemp(prefix="rlxf", dir="/var/tmp"))
    hosts: list[Host] = []
    switch: subprocess.Popen[str] | None = None
    try:
        data, shared = base / "d", base / "shared"
        data.mkdir()
        shared.mkdir()
        switch = _namespaces("switch", base, data, ["--net"], "echo ready; cat > /dev/null")
        _ip(switch.pid, "link add bridge0 type bridge", "link set bridge0 up")
        for number in range(1, count + 1):
            own = base / f"node{number}"
            (own / "r").mkdir(parents=True)
            init = _namespaces(
                own.name, own, data,
                ["--net", "--mount", "--uts", "--pid", "--fork", "--kill-child", "--mount-proc"],
                INIT,
            )  # fmt: skip
            host = Host(own.name, f"{NETWORK}.{number}", own, data, init)
            hosts.append(host)
            _plug(switch.pid, host, number)
        yield hosts, shared
    finally:
        for host in hosts:
            host.end()
        if switch is not None:
            assert switch.stdin is not None
            switch.stdin.close()
            switch.wait(timeout=10)
        shutil.rmtree(base, ignore_errors=True)


def _namespaces(
    name: str, own: Path, data: Path, kinds: list[str], script: str
) -> subprocess.Popen[str]:
    """Start a script in new namespaces and wait until it prints `ready`. kinds: for `unshare`"""
    process = subprocess.Popen(
        ["unshare", *kinds, "bash", "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        text=True, env={**os.environ, "NAME": name, "OWN": str(own), "DATA": str(data)},
    )  # fmt: skip
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n", f"the namespaces of {name} were not made"
    return process


def _plug(switch_pid: int, host: Host, number: int) -> None:
    """Connect the host's eth0 to the bridge; a default route lets Ray find the host's address."""
    _ip(
        switch_pid,
        f"link add port{number} type veth peer name eth0 netns {host.pid}",
        f"link set port{number} master bridge0",
        f"link set port{number} up",
    )
    _ip(
        host.pid,
        f"address add {host.ip}/24 dev eth0",
        "link set eth0 up",
        "route add default dev eth0",
    )


def _ip(pid: int, *commands: str) -> None:
    for command in commands:
        subprocess.run(["nsenter", "-t", str(pid), "--net", "ip", *command.split()], check=True)
