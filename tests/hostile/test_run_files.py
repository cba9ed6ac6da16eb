"""Files that a run writes have private modes and unpredictable names, and follow no link."""

from __future__ import annotations

import ast
import logging
import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import cast

import pytest

from mindspeed_rlxf.cluster.host_agent import HostAgent
from mindspeed_rlxf.cluster.nodes import Place
from mindspeed_rlxf.cluster.witness import GONE, Sighting, Watched, copy_logs
from mindspeed_rlxf.cluster.worker import redirect_output
from mindspeed_rlxf.config.errors import UserError
from mindspeed_rlxf.data.handlers import HANDLERS
from mindspeed_rlxf.data.preprocessing.writer import PromptSetWriter, finish_interrupted
from mindspeed_rlxf.files.safe import make_private_folder, mode_within, replace_file
from mindspeed_rlxf.reporting.line_file import LineFile
from mindspeed_rlxf.reporting.metrics import MetricsWriter
from mindspeed_rlxf.reporting.sample_tokens import TokenWriter
from mindspeed_rlxf.reporting.timeline import Span, Timeline
from mindspeed_rlxf.run import failure, host_files
from mindspeed_rlxf.run.directory import RunDirectory
from mindspeed_rlxf.run.stopping import StopRequest
from mindspeed_rlxf.run.store import Manifest, RunStore
from mindspeed_rlxf.trainer.run import _log_to_file
from mindspeed_rlxf.weights.state_files import write_text

ROOT = Path(__file__).resolve().parents[2]
TEXT = "of the user\n"


@pytest.fixture
def mine(tmp_path: Path) -> Iterator[Path]:
    """A file of the user, which stays as it is."""
    file = tmp_path / "mine"
    file.write_text(TEXT)
    before = file.stat().st_mode
    yield file
    assert file.read_text() == TEXT and file.stat().st_mode == before


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    directory = RunDirectory(tmp_path / "run")
    make_private_folder(directory.logs)
    return directory


def mode(file: Path) -> int:
    return file.stat().st_mode & 0o777


def log(run: RunDirectory) -> None:
    loggers = [logging.getLogger(f"mindspeed_rlxf{part}") for part in ("", ".runtime")]
    before = [list(each.handlers) for each in loggers]
    try:
        _log_to_file(run)
    finally:
        for each, handlers in zip(loggers, before, strict=True):
            each.handlers[:] = handlers


def redirect(run: RunDirectory) -> None:
    """In a process of its own, as it is for good."""
    if (child := os.fork()) == 0:
        try:
            redirect_output(run.logs / "pool" / "rank_00000.log")
        except OSError:
            os._exit(1)
        os._exit(0)
    if os.waitpid(child, 0)[1]:
        raise OSError("it is a link or a pipe, says the child")


WRITERS: dict[str, Callable[[RunDirectory], object]] = {
    "metrics.jsonl": lambda run: MetricsWriter(run.metrics).write(1, {}, 1.0),
    "timeline/iterations_0000001.json": lambda run: Timeline(run.timeline).write(
        1, [Span("x", "p", 0, 1.0, 1.0)]
    ),
    "samples_tokens/rank_00000.jsonl": lambda run: TokenWriter(run.samples_tokens, 0).write(
        1, {1: {"kl": [0.0]}}
    ),
    "logs/driver.log": log,
    "logs/pool/rank_00000.log": redirect,
}
REPLACERS: dict[str, Callable[[RunDirectory], object]] = {
    "failure.json": lambda run: failure.report(run, OSError("full"), StopRequest(1.0)),
    "config.yaml": lambda run: replace_file(run.config, "x", 0o600),
    "checkpoints/.iter_1/trainer/config.yaml": lambda run: write_text(
        run.checkpoints / ".iter_1" / "trainer" / "config.yaml", "x", 0o600
    ),
}


@pytest.fixture
def no_umask() -> Iterator[None]:
    before = os.umask(0)
    yield
    os.umask(before)


@pytest.mark.usefixtures("no_umask")
@pytest.mark.parametrize("name", [*WRITERS, *REPLACERS])
def test_files_of_a_run_are_private(run: RunDirectory, name: str) -> None:
    (WRITERS | REPLACERS)[name](run)
    assert mode(run.path / name) == 0o600
    assert "/" not in name or mode((run.path / name).parent) == 0o700


@pytest.mark.parametrize("name", WRITERS)
def test_nothing_is_appended_to_or_cut_through_a_link(
    run: RunDirectory, mine: Path, name: str
) -> None:
    (run.path / name).parent.mkdir(exist_ok=True)
    (run.path / name).symlink_to(mine)
    with pytest.raises(OSError, match=r"is a link or a pipe|File exists"):
        WRITERS[name](run)
    with pytest.raises(OSError, match="is a link or a pipe"):
        LineFile(run.path / name).cut(0)


@pytest.mark.parametrize("name", REPLACERS)
def test_replacing_a_link_leaves_its_target(run: RunDirectory, mine: Path, name: str) -> None:
    (run.path / name).parent.mkdir(parents=True, exist_ok=True)
    (run.path / name).symlink_to(mine)
    REPLACERS[name](run)
    assert not (run.path / name).is_symlink()


def test_temporary_names_cannot_be_predicted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two writes of the same process use two names; a file that has one is not opened."""
    names: list[str] = []
    real = os.replace

    def seen(source: Path, target: Path) -> None:
        names.append(Path(source).name)
        real(source, target)

    monkeypatch.setattr(os, "replace", seen)
    for _ in range(2):
        replace_file(tmp_path / "file", "x")
    assert len(set(names)) == 2 and all(str(os.getpid()) not in n.split(".") for n in names)
    assert all(re.fullmatch(r"\.file\.[0-9a-f]{16}\.tmp", name) for name in names)


def test_a_rotated_part_keeps_its_mode_and_a_planted_name_is_not_written_through(
    tmp_path: Path, mine: Path
) -> None:
    for name in (".x.jsonl.1.gz", ".x.jsonl.1.gz.0123456789abcdef.tmp"):
        (tmp_path / name).symlink_to(mine)
    file = tmp_path / "x.jsonl"
    replace_file(file, "line\n" * 9, 0o640)
    assert LineFile(file, 1).rotate()
    assert mode(tmp_path / "x.jsonl.1.gz") == 0o640
    assert b"".join(LineFile(file).lines()) == b"line\n" * 9
    assert not (tmp_path / ".x.jsonl.1.gz.0123456789abcdef.tmp").is_symlink(), "a leftover"


def test_logs_of_other_hosts_are_private_too(run: RunDirectory) -> None:
    place = Place("node2", "10.0.0.2", 0, ())
    log = run.logs / "main" / "rank_00000.log"
    worker = Watched("main", 0, place, str(log), cast(HostAgent, None))
    copy_logs([worker], {("main", 0): Sighting(0, GONE, False, "the end\n")})
    assert log.read_text().endswith("the end\n")
    assert mode(log) == 0o600 == mode_within(run.logs)


def test_a_part_of_another_host_is_not_written_through_a_link(tmp_path: Path, mine: Path) -> None:
    folder, token = tmp_path / "iter", "0123456789abcdef"
    entry = {"path": "w", "size": 4, "sha256": "no"}
    folder.mkdir()
    (folder / f".w.{token}.partial").symlink_to(mine)
    assert host_files.write_chunk(folder, entry, 0, b"ab", token) == ""
    assert (
        host_files.write_chunk(folder, entry, 2, b"cd", token)
        == "w differs from what was written (sha256)"
    )
    (folder / f".w.{token}.partial").symlink_to(mine)
    with pytest.raises(OSError, match="is a link or a pipe"):
        host_files.write_chunk(folder, entry, 2, b"cd", token)


def test_a_checkpoint_of_another_host_keeps_the_configuration_private(tmp_path: Path) -> None:
    store = RunStore(tmp_path)
    store.begin(1)
    texts = {"trainer/config.yaml": "x"}
    host_files.commit_part(tmp_path, Manifest(1, [], {}).to_json(), texts, 0o640)
    assert mode(store.path(1) / "trainer" / "config.yaml") == 0o640
    assert mode(store.path(1) / "trainer") == 0o750


@pytest.mark.parametrize("name", ["", "/lock", "/rejected", "/meta"])
def test_a_data_set_is_not_written_through_a_link(tmp_path: Path, mine: Path, name: str) -> None:
    (tmp_path / "elsewhere").mkdir()
    folder = tmp_path / ".set_packed.partial"
    if name:
        folder.mkdir()
    Path(f"{folder}{name}").symlink_to(mine if name else tmp_path / "elsewhere")
    try:
        PromptSetWriter(tmp_path / "set", next(iter(HANDLERS.values()))).__exit__(None, None, None)
    except OSError as error:
        assert "link" in str(error)
    assert list((tmp_path / "elsewhere").iterdir()) == []


def test_a_list_of_moves_cannot_name_files_of_other_folders(tmp_path: Path, mine: Path) -> None:
    folder = tmp_path / ".set_packed.partial"
    folder.mkdir()
    for moves in ('[["../mine", "set_x"]]', '[["a", "../x"]]', f'[["{mine}", "set_x"]]'):
        (folder / "moves").write_text(moves)
        with pytest.raises((OSError, UserError), match="names files elsewhere"):
            finish_interrupted(tmp_path / "set")


# Files that write into a folder or a root which this process has made, below /proc/self, or
# documents of this repository.
WRITES_ITSELF = {
    "rewards/sandbox/launch.py", "rewards/sandbox/rights.py", "rewards/sandbox/root.py",
    "config/migration.py", "config/reference.py", "reporting/metric_table.py",
    "weights/convert.py", "weights/torch_dist.py",
    "weights/torch_file.py", "reporting/metrics.py", "files/safe.py",
}  # fmt: skip


def test_only_named_modules_open_files_for_writing() -> None:
    """No `open` for writing, `write_text` of a path, or name made from a process id elsewhere."""
    package = ROOT / "mindspeed_rlxf"
    found = set()
    for file in package.rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and _writes(node):
                found.add(file.relative_to(package).as_posix())
    assert found <= WRITES_ITSELF, found - WRITES_ITSELF
    assert {"config/migration.py", "weights/torch_file.py"} <= found, "it finds these"


def _writes(call: ast.Call) -> bool:
    name = call.func.attr if isinstance(call.func, ast.Attribute) else ""
    if name in ("write_text", "write_bytes", "copyfile", "copy2"):
        return True
    if (isinstance(call.func, ast.Name) and call.func.id == "open") or name == "open":
        words = [a.value for a in call.args if isinstance(a, ast.Constant)]
        return any(re.fullmatch(r"r\+b?|rb\+|[wax]b?\+?b?", str(word)) for word in words)
    return False
