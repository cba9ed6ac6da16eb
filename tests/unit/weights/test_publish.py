"""A folder appears whole; what was not written by us is never removed."""

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from mindspeed_rlxf.config.problems import UserError
from mindspeed_rlxf.weights.tensor_conversion import MARKER, new_folder

FILES = ("a", "below/b")


def write(target: Path, text: str = "1", replace: bool = False) -> None:
    with new_folder(target, replace) as folder:
        (folder / "below").mkdir()
        for name in FILES:
            (folder / name).write_text(text)
        assert not target.exists() or replace


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


@pytest.mark.parametrize("where", ["x", "x.partial"])
@pytest.mark.parametrize("kind", ["without marker", "link"])
def test_what_others_wrote_stays(tmp_path: Path, where: str, kind: str) -> None:
    write(tmp_path / "made")
    folder = tmp_path / where
    if kind == "link":
        folder.symlink_to(tmp_path / "made")
    else:
        (tmp_path / "made").rename(folder)
        (folder / MARKER).unlink()
    before = sorted(path for path in tmp_path.rglob("*"))
    with pytest.raises(UserError, match="convert"):
        write(tmp_path / "x", "2", replace=True)
    assert sorted(path for path in tmp_path.rglob("*")) == before
    assert (folder / "a").read_text() == "1"


def test_a_target_that_appears_meanwhile_stays(tmp_path: Path) -> None:
    with pytest.raises(OSError), new_folder(tmp_path / "x", False):
        (tmp_path / "x").mkdir()
        (tmp_path / "x" / "mine").write_text("mine")
    assert names(tmp_path) == {"x"} and names(tmp_path / "x") == {"mine"}


def test_a_killed_writer_leaves_no_target_and_the_next_one_starts_anew(tmp_path: Path) -> None:
    code = (
        "import os, signal, sys; from pathlib import Path\n"
        "from mindspeed_rlxf.weights.tensor_conversion import new_folder\n"
        "with new_folder(Path(sys.argv[1]), False) as folder:\n"
        "    (folder / 'a').write_text('0')\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path / "x")], timeout=120)
    assert done.returncode == -signal.SIGKILL and names(tmp_path) == {"x.partial"}
    write(tmp_path / "x")
    assert names(tmp_path) == {"x"}
