"""The driver's log has what the console shows, also from before the run directory exists."""

import io
import logging
from collections.abc import Iterator

import pytest

from mindspeed_rlxf.reporting import run_log
from mindspeed_rlxf.reporting.console import Console
from mindspeed_rlxf.reporting.live import LiveConsole


@pytest.fixture(autouse=True)
def handlers() -> Iterator[None]:
    before = list(run_log.PACKAGE.handlers)
    level = run_log.PACKAGE.level
    yield
    run_log.PACKAGE.setLevel(level)
    for handler in [h for h in run_log.PACKAGE.handlers if h not in before]:
        run_log.PACKAGE.removeHandler(handler)


def test_the_first_lines_of_a_command_are_kept_for_its_log(tmp_path, capsys):
    run_log.begin()
    run_log.say("note: of the configuration")
    logging.getLogger("mindspeed_rlxf.data").warning("no row has %s", "anser")
    run_log.write_to(tmp_path / "driver.log")
    run_log.say("done: 3 iterations")
    text = (tmp_path / "driver.log").read_text()
    for line in ("note: of the configuration", "no row has anser", "done: 3 iterations"):
        assert text.count(line) == 1
    printed = capsys.readouterr()
    assert printed.err == "warning: no row has anser\n"
    assert printed.out.splitlines() == ["note: of the configuration", "done: 3 iterations"]


@pytest.mark.parametrize("kind", [Console, LiveConsole])
def test_lines_of_a_console_are_logged(tmp_path, kind):
    """The live view draws iterations in place; their lines are in the log alone."""
    run_log.write_to(tmp_path / "driver.log")
    console = kind(io.StringIO())
    console.begin(2, ["critic/kl"])
    console.warn_once("kl", "the KL is 9")
    console.update(1, {"critic/kl": 0.5})
    console.close()
    text = (tmp_path / "driver.log").read_text()
    assert "warning: the KL is 9\n" in text and "iteration: 1 / 2 | critic/kl : 0.5000" in text
