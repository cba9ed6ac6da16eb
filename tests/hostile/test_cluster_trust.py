"""Clusters, address files and ports of other users are refused before Ray is called."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from mindspeed_rlxf.cluster.ray import cluster as ray_cluster
from mindspeed_rlxf.cluster.ray import trust as ray_trust
from mindspeed_rlxf.cluster.ray.trust import View, check_trust
from mindspeed_rlxf.config import cluster
from mindspeed_rlxf.config.cluster import choose_cluster, find_local_cluster
from mindspeed_rlxf.config.errors import UserError

LONG = pytest.param("x" * 100_000, id="long")
ANOTHER = 65534  # nobody
LISTEN = """
import os, socket, sys, time
os.setuid(int(sys.argv[2]))
server = socket.create_server((sys.argv[1], 0))
print(server.getsockname()[1], flush=True)
time.sleep(60)
"""


@pytest.fixture(autouse=True)
def ray_is_not_asked(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path))
    monkeypatch.setattr(
        ray_trust, "ask_without_token", lambda address: pytest.fail("Ray was asked")
    )


@pytest.fixture
def port() -> Iterator[int]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server.getsockname()[1]


@contextmanager
def listener_of(uid: int, host: str = "127.0.0.1") -> Iterator[int]:
    """A port where a process of another user listens."""
    if os.getuid() != 0:
        pytest.skip("only root can start a process of another user")
    words = [sys.executable, "-S", "-c", LISTEN, host, str(uid)]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            yield int(process.stdout.readline())
        finally:
            process.kill()


@pytest.fixture
def show(monkeypatch: pytest.MonkeyPatch) -> Callable[[View], None]:
    """Let the cluster that is asked answer with a view."""
    return lambda view: monkeypatch.setattr(ray_trust, "ask_without_token", lambda address: view)


def note(folder: Path, text: str) -> Path:
    file = folder / "ray" / "ray_current_cluster"
    file.parent.mkdir(exist_ok=True)
    file.write_text(text)
    return file


def refusal(address: str, allow: bool = False) -> str:
    with pytest.raises(UserError) as refused:
        check_trust(address, allow)
    (line,) = str(refused.value).splitlines()
    return line


def test_the_owner_of_a_listener_is_known(port: int) -> None:
    mine = {os.getuid()}
    assert cluster.find_owners(f"127.0.0.1:{port}") == mine
    assert cluster.find_owners(f"localhost:{port}") == mine
    assert cluster.find_owners(f"127.0.0.2:{port}") == set()
    with socket.create_server(("", 0)) as everywhere:
        assert cluster.find_owners(f"127.0.0.1:{everywhere.getsockname()[1]}") == mine
    with socket.create_server(("::", 0), family=socket.AF_INET6, dualstack_ipv6=True) as both:
        at = both.getsockname()[1]
        assert cluster.find_owners(f"127.0.0.1:{at}") == cluster.find_owners(f"[::1]:{at}") == mine
    assert cluster.is_here("127.0.0.1") and not cluster.is_here("198.51.100.7")


@pytest.mark.parametrize("host", ["127.0.0.1", "0.0.0.0"])
def test_a_listener_of_another_user_gets_no_token(show: Callable[[View], None], host: str) -> None:
    with listener_of(ANOTHER, host) as port:
        address = f"127.0.0.1:{port}"
        for view in (View(True), View(False, ("127.0.0.1",))):
            show(view)
            line = refusal(address)
            assert line.startswith(f"runtime.address={address} must be a Ray cluster of this user")
            assert f"user id {ANOTHER} listens there; " in line
        show(View(True))
        assert check_trust(address, allow_unauthenticated=True)


def test_a_note_that_names_a_listener_of_another_user_is_not_followed(tmp_path: Path) -> None:
    with listener_of(ANOTHER) as port:
        note(tmp_path, f"127.0.0.1:{port}\n")
        assert find_local_cluster() is None and choose_cluster(None).address is None


@pytest.mark.parametrize(
    "put", [lambda file, moved: file.symlink_to(moved), lambda file, _: os.mkfifo(file),
            lambda file, _: file.mkdir()], ids=["link", "pipe", "folder"],
)  # fmt: skip
def test_a_note_that_is_no_plain_file_is_not_read(
    tmp_path: Path, port: int, put: Callable[[Path, Path], None]
) -> None:
    file = note(tmp_path, f"127.0.0.1:{port}")
    assert find_local_cluster() == f"127.0.0.1:{port}"
    put(file, file.rename(tmp_path / "moved"))
    began = time.monotonic()
    assert find_local_cluster() is None and time.monotonic() - began < 20  # it has a limit


@pytest.mark.parametrize(
    "text",
    ["", "auto", "local", "ray://127.0.0.1:1", "127.0.0.1", "127.0.0.1:0", "a b:1", LONG],
)
def test_a_note_without_an_address_is_ignored(tmp_path: Path, text: str) -> None:
    note(tmp_path, text)
    assert find_local_cluster() is None


@pytest.mark.parametrize(
    "address",
    ["auto", "ray://127.0.0.1:10001", "127.0.0.1", ":6379", "127.0.0.1:99999", "a b:6379",
     "127.0.0.1:6379/x", "[::1:6379", "127.0.0.1:\u0661\u0662", "-h:6379", LONG],
)  # fmt: skip
def test_a_wrong_address_is_refused_in_one_line(
    monkeypatch: pytest.MonkeyPatch, address: str
) -> None:
    monkeypatch.setattr(cluster, "find_local_cluster", lambda: None)
    began = time.monotonic()
    with pytest.raises(UserError) as refused:
        ray_cluster.open_cluster(address, {})
    (line,) = str(refused.value).splitlines()
    start = f"runtime.address={address} must be that of a running Ray cluster ("
    assert line.startswith(start[:200]) and len(line) < 10_000
    assert time.monotonic() - began < 30


def test_a_cluster_without_tokens_is_joined_where_this_user_runs_it_on_one_host(
    show: Callable[[View], None], port: int, caplog: pytest.LogCaptureFixture
) -> None:
    address = f"127.0.0.1:{port}"
    show(View(False, ("127.0.0.1",)))
    assert not check_trust(address, allow_unauthenticated=False)
    (record,) = caplog.records
    assert record.levelname == "WARNING"
    assert record.message.startswith(f"the Ray cluster at {address} asks for no token: every user")
    show(View(True))
    assert check_trust(address, allow_unauthenticated=False) and len(caplog.records) == 1


def test_other_clusters_without_tokens_are_refused_with_the_two_commands(
    show: Callable[[View], None], port: int, caplog: pytest.LogCaptureFixture
) -> None:
    address = f"127.0.0.1:{port}"
    show(View(False, ("127.0.0.1", "198.51.100.7")))
    line = refusal(address)
    assert line.startswith(f"runtime.address={address} must be a Ray cluster that asks for a token")
    assert "ray get-auth-token --generate" in line and "export RAY_AUTH_MODE=token" in line
    assert line.endswith("runtime.allow_unauthenticated=true where the network keeps others out")
    assert not check_trust(address, allow_unauthenticated=True)
    assert "whoever reaches it" in caplog.records[-1].message
    show(View(False, ("198.51.100.7",)))
    assert "198.51.100.7:6379" in refusal("198.51.100.7:6379")  # of another host
    with socket.socket() as closed:  # of this host, and nobody is known to listen
        closed.bind(("127.0.0.1", 0))
        refusal(f"127.0.0.1:{closed.getsockname()[1]}")
