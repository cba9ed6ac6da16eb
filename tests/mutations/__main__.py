"""Put one fault after another into a copy of the package, and list the tests that fail.

    python -m tests.mutations [--only ID ...] [--output FILE]

`mutations.yaml` lists the faults: an old text, which must occur exactly once in the whole package,
and the text that replaces it. The copy is first tested without a fault. Then, for each fault, the
unit tests of the core run, and the tests that the entry of the fault names; after them the fault is
removed. Writes a line of JSON per fault with the test functions that fail. Exits with 1 where no
test fails for some fault. `recorded.json` has the functions that failed when the table was made,
`recorded_latest.json` those of the latest run over all faults.
"""

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
SLOW = ("convert", "convert_memory", "supervisor", "bad_files", "npu_driver",
        "host_parts", "real_models", "pipeline", "handlers", "resolve", "mindspeed_llm",
        "tokenizer")  # fmt: skip
"""Test files of these folders, `test_NAME.py`, that are slow and do not test the core."""
NOT_COPIED = (".*", "outputs", "build", "dist", "wheelhouse", "*.egg-info", "__pycache__")
LIMIT_S = 600.0
NAMED = re.compile(r"^(?:FAILED|ERROR) (\S+?\.py(?:::\w+)+)", re.MULTILINE)

Mutation = dict[str, Any]
"""Keys: id, file (where the old text was first), old, new, breaks (what the fault does), tests
(optional: tests to run besides those of the core)"""


def find_file(mutation: Mutation, package: Path) -> Path:
    """Return the file with the old text. Raises ValueError unless the text occurs exactly once."""
    texts = {file: file.read_text(encoding="utf-8") for file in sorted(package.rglob("*.py"))}
    counts = {file: n for file, text in texts.items() if (n := text.count(mutation["old"]))}
    if list(counts.values()) != [1]:
        where = ", ".join(str(file.relative_to(package.parent)) for file in counts) or "nowhere"
        raise ValueError(f"{mutation['id']}: the old text must occur once, it is in: {where}")
    return next(iter(counts))


def find_failures(copy: Path, more: list[str]) -> list[str]:
    """Run the tests of the core in a copy; return the test functions that fail, without parameters.

    more: further tests to run. Raises RuntimeError where pytest cannot run them, or takes longer
    than LIMIT_S.
    """
    folders = [f"tests/unit/{name}" for name in CORE if (copy / "tests/unit" / name).is_dir()]
    command = [sys.executable, "-m", "pytest", *folders, *more, "-m", "not long", "-q"]
    command += ["--tb=no", "--color=no", "-p", "no:cacheprovider", "--hypothesis-seed=0"]
    command += [f"--basetemp={copy.parent / 'tests'}"]
    command += [f"--ignore-glob=*/unit/*/test_{name}.py" for name in SLOW]
    shutil.rmtree(copy / ".hypothesis", ignore_errors=True)  # no examples of an earlier fault
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
    if process.returncode not in (0, 1):  # pytest could not collect or run all tests
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
        files = [find_file(mutation, copy / PACKAGE) for mutation in chosen]
        if found := find_failures(copy, sorted({t for m in chosen for t in m.get("tests", ())})):
            raise SystemExit(f"without any mutation these tests fail: {', '.join(found)}")
        survivors = []
        stream = given.output.open("w") if given.output else sys.stdout
        for mutation, file in zip(chosen, files, strict=True):
            began, text = time.monotonic(), file.read_text(encoding="utf-8")
            file.write_text(text.replace(mutation["old"], mutation["new"]), encoding="utf-8")
            try:
                found = find_failures(copy, mutation.get("tests", []))
            except RuntimeError as error:
                found = []  # counts as a fault that no test sees
                print(f"{mutation['id']}: {error}", file=sys.stderr)
            file.write_text(text, encoding="utf-8")
            seconds = round(time.monotonic() - began, 1)
            line = {"id": mutation["id"], "number": len(found), "seconds": seconds}
            print(json.dumps({**line, "tests": found}), file=stream, flush=True)
            survivors += [] if found else [mutation["id"]]
    print(f"{len(chosen)} mutations; no test fails for:", *survivors or ["none"], file=sys.stderr)
    return 1 if survivors else 0


if __name__ == "__main__":
    sys.exit(main())
