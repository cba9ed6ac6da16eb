"""A live page is served to this host alone, and follows what the run writes."""

from __future__ import annotations

import gzip
import http.client
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from mindspeed_rlxf.cli.watch import main
from mindspeed_rlxf.reporting.metrics import JsonlWriter, metrics_record
from mindspeed_rlxf.reporting.report.content import RunFolder
from mindspeed_rlxf.reporting.report.server import LiveRun, LiveServer
from tests.report_run import metrics_of, write_run


@pytest.fixture
def server(tmp_path: Path) -> Iterator[LiveServer]:
    run = write_run(tmp_path / "run", 5)
    server = LiveServer(LiveRun(lambda: RunFolder(run, "run", "running"), 100), 0)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


def ask(server: LiveServer, path: str, host: str | None = None, method: str = "GET") -> Any:
    """Return (status, headers, content)."""
    connection = http.client.HTTPConnection("127.0.0.1", server.server_port, timeout=10)
    headers = {} if host is None else {"Host": host}
    connection.request(method, path, headers=headers)
    reply = connection.getresponse()
    return reply.status, reply.headers, reply.read()


def test_the_page_and_its_data_follow_the_files(server: LiveServer, tmp_path: Path) -> None:
    status, headers, page = ask(server, "/")
    assert status == 200 and b'data-live="yes"' in page and b"connect-src 'self'" in page
    assert headers["X-Content-Type-Options"] == "nosniff"
    before = ask(server, "/version")[2]
    assert before == ask(server, "/version")[2]
    done = [json.loads(gzip.decompress(ask(server, "/data/main")[2]))["runs"][0]["done"]]
    JsonlWriter(tmp_path / "run" / "metrics.jsonl").write(metrics_record(6, metrics_of(6), 1.0))
    assert ask(server, "/version")[2] != before
    done += [json.loads(gzip.decompress(ask(server, "/data/main")[2]))["runs"][0]["done"]]
    (samples,) = json.loads(gzip.decompress(ask(server, "/data/samples")[2]))
    assert done == [5, 6] and len(samples["samples"]) == 5 * 4 + 6 * 3


@pytest.mark.parametrize("host", ["evil.example", "evil.example:80", "", "127.0.0.1", "localhost"])
def test_other_names_for_this_host_are_refused(server: LiveServer, host: str) -> None:
    status, _, content = ask(server, "/data/samples", host)
    assert status == 403 and b"prompt" not in content


def test_names_of_this_host_and_no_other_paths_or_methods(server: LiveServer) -> None:
    port = server.server_port
    assert [ask(server, "/version", f"{name}:{port}")[0] for name in ("localhost", "[::1]")] == [
        200, 200,
    ]  # fmt: skip
    assert server.server_address[0] == "127.0.0.1"
    paths = ("/../config.yaml", "/config.yaml", "/data/..%2f", "/?x")
    assert {ask(server, path)[0] for path in paths} == {404}
    assert ask(server, "/", method="POST")[0] == 501


def test_a_taken_port_a_missing_run_and_a_bad_number_are_one_line(
    server: LiveServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([str(tmp_path / "run"), "--port", str(server.server_port)]) == 2
    assert main([str(tmp_path / "run"), "--port", "70000"]) == 2
    assert main([str(tmp_path / "none")]) == 2
    assert main([str(tmp_path / "run"), "--samples=-1", "--port", "70000"]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 4 and all(line.startswith("error: ") for line in lines)
    assert f"--port={server.server_port} must be a free port of this host" in lines[0]
    assert "--samples=-1 must be 0 or more" in lines[3]


def test_ctrl_c_ends_the_command_with_status_0(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", 2)
    code = "import sys; from mindspeed_rlxf.cli.watch import main; sys.exit(main(sys.argv[1:]))"
    command = [sys.executable, "-c", code, str(run), "--port", "0"]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    # Programs in the background of a shell without job control ignore SIGINT.
    heeds = partial(signal.signal, signal.SIGINT, signal.SIG_DFL)
    with subprocess.Popen(command, **pipes, preexec_fn=heeds) as watch:
        assert watch.stdout and b"http://127.0.0.1:" in watch.stdout.readline()
        os.kill(watch.pid, signal.SIGINT)
        _, errors = watch.communicate(timeout=30)
    assert watch.returncode == 0 and errors == b""
