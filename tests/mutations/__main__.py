"""Put one fault after another into a copy of the package, and find a test that fails.

    python -m tests.mutations [--only ID ...]

`mutations.yaml` lists the faults: an old text, which must occur exactly once in the whole package,
and the text that replaces it. For each fault the test runs that `seen_by.json` has for it; if it
passes, the unit tests of the core do, and the tests that the fault's entry names, up to the first
failure, which is then written to `seen_by.json`. Such a test must pass without the fault. Exits
with 1 if no test fails for some fault.
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
SEEN_BY = Path(__file__).with_name("seen_by.json")
PACKAGE = "mindspeed_rlxf"
CORE = ("algorithms", "engine", "rollout", "roles", "rewards", "data", "trainer", "models",
        "weights", "checkpoint", "config")  # fmt: skip
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


def core_tests(copy: Path) -> list[str]:
    """Return pytest's arguments for the unit tests of the core."""
    folders = [f"tests/unit/{name}" for name in CORE if (copy / "tests/unit" / name).is_dir()]
    return folders + [f"--ignore-glob=*/unit/*/test_{name}.py" for name in SLOW]


def find_failure(copy: Path, tests: list[str]) -> str | None:
    """Run tests in a copy up to the first failure; return its function, without parameters.

    None if all pass, or a named test does not exist. Raises RuntimeError after LIMIT_S.
    """
    command = [sys.executable, "-m", "pytest", *tests, "-m", "not long", "-q", "-x"]
    command += ["--tb=no", "--color=no", "-p", "no:cacheprovider", "--hypothesis-seed=0"]
    command += [f"--basetemp={copy.parent / 'tests'}"]
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
    found = NAMED.search(output)
    return found[1] if found else None


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--only", nargs="+", metavar="ID", help="default: all")
    given = parser.parse_args()
    table: list[Mutation] = yaml.safe_load(TABLE.read_text(encoding="utf-8"))
    if unknown := set(given.only or ()) - {mutation["id"] for mutation in table}:
        parser.error(f"mutations.yaml has no {', '.join(sorted(unknown))}")
    chosen = [mutation for mutation in table if not given.only or mutation["id"] in given.only]
    seen_by: dict[str, str] = json.loads(SEEN_BY.read_text(encoding="utf-8"))
    survivors = []
    with tempfile.TemporaryDirectory(prefix="mutations-") as folder:
        copy = Path(folder) / "tree"
        shutil.copytree(ROOT, copy, ignore=shutil.ignore_patterns(*NOT_COPIED))
        for mutation in chosen:
            began, file = time.monotonic(), find_file(mutation, copy / PACKAGE)
            text = file.read_text(encoding="utf-8")
            file.write_text(text.replace(mutation["old"], mutation["new"]), encoding="utf-8")
            known = seen_by.pop(mutation["id"], None)
            found = find_failure(copy, [known]) if known else None
            found = found or find_failure(copy, [*core_tests(copy), *mutation.get("tests", [])])
            file.write_text(text, encoding="utf-8")
            if found and find_failure(copy, [found]):
                raise SystemExit(f"without any mutation {found} fails")
            seconds = round(time.monotonic() - began, 1)
            print(json.dumps({"id": mutation["id"], "seconds": seconds, "test": found}), flush=True)
            if found:
                seen_by[mutation["id"]] = found
            else:
                survivors.append(mutation["id"])
    SEEN_BY.write_text(json.dumps(seen_by, indent=1, sort_keys=True) + "\n", encoding="utf-8")
    print(f"{len(chosen)} mutations; no test fails for:", *survivors or ["none"], file=sys.stderr)
    return 1 if survivors else 0


if __name__ == "__main__":
    sys.exit(main())
