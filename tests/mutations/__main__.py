"""Put one fault after the other into a copy of the package and list the tests that fail.

    python -m tests.mutations [--only ID ...] [--output FILE]

`mutations.yaml` has the faults: an old text, which stands once in the whole package wherever its
file is, and the new one. The copy is first tested unchanged. Then, for each fault, the unit
tests of the core run with the tests that its entry names, and the fault is removed. Writes a JSON
line per fault, with the test functions that fail; exits with 1 where none does. `recorded.json` has
the functions that saw each fault when the table was made.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).parents[2]
TABLE = Path(__file__).with_name("mutations.yaml")
PACKAGE = "mindspeed_rlxf"
CORE = ("algorithms", "engine", "rollout", "roles", "rewards", "data", "trainer", "models",
        "weights", "run", "config")  # fmt: skip
SLOW = ("convert", "convert_memory", "staging", "supervisor", "bad_files", "npu_driver",
        "host_parts", "real_models", "pipeline", "handlers", "resolve", "older_toolkit",
        "tokenizer", "shipped")  # fmt: skip
"""Files of these folders that take long and are about something else."""
NOT_COPIED = (".*", "outputs", "build", "dist", "wheelhouse", "*.egg-info", "__pycache__")
LIMIT_S = 600.0
NAMED = re.compile(r"^(?:FAILED|ERROR) (\S+?\.py(?:::\w+)+)", re.MULTILINE)

Mutation = dict[str, Any]
"""id, file (where the text stood first), old, new, breaks (what is wrong then), tests (optional:
more than those of the core)"""


def place_of(mutation: Mutation, package: Path) -> Path:
    """The one file with the old text. Raises ValueError where there is none, or more."""
    texts = {file: file.read_text(encoding="utf-8") for file in sorted(package.rglob("*.py"))}
    counts = {file: n for file, text in texts.items() if (n := text.count(mutation["old"]))}
    if list(counts.values()) != [1]:
        where = ", ".join(str(file.relative_to(package.parent)) for file in counts) or "nowhere"
        raise ValueError(f"{mutation['id']}: the old text must stand once, it is in: {where}")
    return next(iter(counts))


def failing(copy: Path, more: list[str]) -> list[str]:
    """Test functions that fail, without the ids of their parameters.

    more: tests beside those of the core. Raises RuntimeError where the tests do not come to an end.
    """
    folders = [f"tests/unit/{name}" for name in CORE if (copy / "tests/unit" / name).is_dir()]
    command = [sys.executable, "-m", "pytest", *folders, *more, "-m", "not long", "-q"]
    command += ["--tb=no", "--color=no", "-p", "no:cacheprovider", "--hypothesis-seed=0"]
    command += [f"--basetemp={copy.parent / 'tests'}"]
    command += [f"--ignore-glob=*/unit/*/test_{name}.py" for name in SLOW]
    shutil.rmtree(copy / ".hypothesis", ignore_errors=True)  # what failed is tried first
    how: dict[str, Any] = {"cwd": copy, "env": {**os.environ, "PYTHONPATH": str(copy)}}
    how |= {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    process = subprocess.Popen(command, start_new_session=True, **how)
    try:
        output, _ = process.communicate(timeout=LIMIT_S)
    except subprocess.TimeoutExpired:
        raise RuntimeError(f"the tests take longer than {LIMIT_S:.0f} s") from None
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait(timeout=10)
    if process.returncode not in (0, 1):  # nothing was collected, or not all
        raise RuntimeError(f"pytest ended with {process.returncode}:\n{output[-2000:]}")
    return sorted(set(NAMED.findall(output)))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--only", nargs="+", metavar="ID", help="default: all")
    parser.add_argument("--output", type=Path, help="the JSON lines; default: standard output")
    given = parser.parse_args()
    table: list[Mutation] = yaml.safe_load(TABLE.read_text(encoding="utf-8"))
    if unknown := set(given.only or ()) - {mutation["id"] for mutation in table}:
        parser.error(f"mutations.yaml has no {', '.join(sorted(unknown))}")
    chosen = [mutation for mutation in table if not given.only or mutation["id"] in given.only]
    with tempfile.TemporaryDirectory(prefix="mutations-") as folder:
        copy = Path(folder) / "tree"
        shutil.copytree(ROOT, copy, ignore=shutil.ignore_patterns(*NOT_COPIED))
        files = [place_of(mutation, copy / PACKAGE) for mutation in chosen]
        if found := failing(copy, sorted({t for m in chosen for t in m.get("tests", ())})):
            raise SystemExit(f"without any mutation these tests fail: {', '.join(found)}")
        survivors = []
        stream = given.output.open("w") if given.output else sys.stdout
        for mutation, file in zip(chosen, files, strict=True):
            began, text = time.monotonic(), file.read_text(encoding="utf-8")
            file.write_text(text.replace(mutation["old"], mutation["new"]), encoding="utf-8")
            try:
                found = failing(copy, mutation.get("tests", []))
            except RuntimeError as error:
                found = []  # no test says what is wrong
                print(f"{mutation['id']}: {error}", file=sys.stderr)
            file.write_text(text, encoding="utf-8")
            seconds = round(time.monotonic() - began, 1)
            line = {"id": mutation["id"], "number": len(found), "seconds": seconds}
            print(json.dumps({**line, "tests": found}), file=stream, flush=True)
            survivors += [] if found else [mutation["id"]]
    print(f"{len(chosen)} mutations, not seen:", *survivors or ["none"], file=sys.stderr)
    return 1 if survivors else 0


if __name__ == "__main__":
    sys.exit(main())
