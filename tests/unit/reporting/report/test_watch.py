"""A live page is served to this host alone, and follows what the run writes."""

import http.client
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from functools import partial
from http.server import HTTPServer
from pathlib import Path

import pytest

from mindspeed_rlxf.cli.watch import main, make_server, wait_for_iteration
from mindspeed_rlxf.reporting.jsonl import JsonlWriter, metrics_record
from tests.report_run import metrics_of, write_run


@pytest.fixture
def server(tmp_path: Path) -> Iterator[HTTPServer]:
    server = make_server(write_run(tmp_path / "run", 5), 100, 0)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


def ask(server: HTTPServer, path: str, host: str | None = None) -> tuple[int, bytes]:
    connection = http.client.HTTPConnection("127.0.0.1", server.server_port, timeout=10)
    connection.request("GET", path, headers={} if host is None else {"Host": host})
    reply = connection.getresponse()
    return reply.status, reply.read()


def test_the_page_follows_the_files(server, tmp_path):
    status, page = ask(server, "/")
    assert status == 200 and b"connect-src 'self'" in page
    before = ask(server, "/version")[1]
    assert before == ask(server, "/version")[1] and before in page
    writer = JsonlWriter(tmp_path / "run" / "metrics.jsonl")
    writer.write(metrics_record(6, metrics_of(6), 1.0))
    after = ask(server, "/version")[1]
    assert after != before and after in ask(server, "/")[1]


@pytest.mark.parametrize(("path", "host", "status"), [
    ("/", "evil.example", 403), ("/", "", 403), ("/", "127.0.0.1", 403),
    ("/version", "localhost:{port}", 200), ("/../config.yaml", None, 404),
    ("/config.yaml", None, 404), ("/?x", None, 404),
])  # fmt: skip
def test_other_names_for_this_host_and_other_paths_are_refused(server, path, host, status):
    assert server.server_address[0] == "127.0.0.1"
    found, content = ask(server, path, host and host.format(port=server.server_port))
    assert found == status and b"data-main" not in content


def test_a_taken_port_a_missing_run_and_a_bad_number_are_one_line(server, tmp_path, capsys):
    assert main([str(tmp_path / "run"), "--port", str(server.server_port)]) == 2
    assert main([str(tmp_path / "run"), "--port", "70000"]) == 2
    assert main([str(tmp_path / "none")]) == 2
    assert main([str(tmp_path / "run"), "--samples=-1"]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 4 and all(line.startswith("error: ") for line in lines)


def test_the_first_iteration_of_a_run_is_waited_for(tmp_path, monkeypatch):
    run = write_run(tmp_path / "run", 2)
    metrics = run / "metrics.jsonl"
    written = metrics.read_bytes()
    metrics.unlink()
    waits: list[float] = []

    def sleep(seconds: float) -> None:
        waits.append(seconds)
        if len(waits) == 2:
            metrics.write_bytes(written)

    monkeypatch.setattr("mindspeed_rlxf.cli.watch.time.sleep", sleep)
    wait_for_iteration(run)
    assert len(waits) == 2
    metrics.unlink()
    (run / "failure.json").touch()
    wait_for_iteration(run)
    wait_for_iteration(tmp_path / "none")
    assert len(waits) == 2, "of a run that failed, or of no run, there is nothing to wait for"


def test_ctrl_c_ends_the_command_with_status_0(tmp_path):
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
