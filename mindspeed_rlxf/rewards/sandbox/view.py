"""The files that a program can see: one Python, the system's libraries, and no user's files."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any

SYSTEM = ("/usr", "/lib", "/lib64", "/bin")
LIBRARY_CACHE = "/etc/ld.so.cache"
DEVICES = ("null", "zero", "full", "random", "urandom")
PROGRAM = "/box/program.py"
SCRATCH = "/tmp"

# Report where the files of a Python are.
_PLACES = """
import json, os, sys, sysconfig
print(json.dumps({
    "executable": os.path.realpath(sys.executable),
    "stdlib": os.path.realpath(sysconfig.get_path("stdlib")),
    "prefixes": [os.path.realpath(path) for path in (sys.prefix, sys.base_prefix)],
}))
"""
# Report the shared libraries of all extension modules of the standard library, which are mapped
# when the modules are imported.
_LIBRARIES = """
import importlib, json, os, sysconfig
dynamic = os.path.join(sysconfig.get_path("stdlib"), "lib-dynload")
for name in sorted({file.split(".")[0] for file in os.listdir(dynamic)}):
    if not name.startswith(("_test", "_xx", "xx", "_tkinter", "_crypt", "nis")):
        try:
            importlib.import_module(name)
        except ImportError:
            pass
with open("/proc/self/maps") as maps:
    mapped = {line.split(None, 5)[5].strip() for line in maps if line.count("/")}
print(json.dumps(sorted(path for path in mapped if ".so" in path and os.path.isfile(path))))
"""
# Without packages `site` does not run: it defines exit() and quit(), and costs most of the start.
_RUN = """
import site, sys
site.setquit()
del sys.argv[0], site
__file__ = sys.argv[0]
del sys
exec(compile(open(__file__, "rb").read(), __file__, "exec"))
"""
_NOT_COPIED = shutil.ignore_patterns(
    "test", "tests", "idlelib", "tkinter", "turtledemo", "ensurepip", "lib2to3", "site-packages",
    "dist-packages", "config-*", "*.a", "*.opt-1.pyc", "*.opt-2.pyc",
)  # fmt: skip


@dataclass(frozen=True)
class View:
    """The interpreter and the folders that a program can see.

    python:   path of the interpreter
    packages: whether programs can import packages installed for the interpreter
    folders:  folders that are shown read-only; a link stays a link
    stdlib:   folder of the standard library
    """

    python: str
    packages: bool
    folders: tuple[str, ...]
    stdlib: str

    def command(self, program: str) -> list[str]:
        """Return the command line that runs the file `program` as `__main__`.

        Without the user's packages, and without any others unless `packages`.
        """
        without = [] if self.packages else ["-S"]
        return [self.python, "-s", *without, "-c", _RUN, program]


def inspect_python(python: str, packages: bool) -> View:
    """Run an interpreter to find its files, and return what programs can see with it.

    Raises OSError where it does not start, subprocess.TimeoutExpired after 60 s, and ValueError
    where it is installed in a folder that contains this user's home, which programs would see.
    """
    found = _run_for_json(python, _PLACES)
    outside = [p for p in dict.fromkeys(found["prefixes"]) if not p.startswith("/usr")]
    home = os.path.realpath(os.path.expanduser("~"))
    for prefix in outside:
        if Path(home).is_relative_to(prefix):
            raise ValueError(f"{python} is installed in {prefix}, which holds the home {home}")
    system = [path for path in SYSTEM if os.path.lexists(path)]
    return View(
        python=os.path.abspath(python) if packages else found["executable"],
        packages=packages,
        folders=(*system, *outside),
        stdlib=found["stdlib"],
    )


def _run_for_json(python: str, program: str) -> Any:
    """Run a trusted program that prints JSON, and return the parsed output.

    Raises OSError where it ends with an error, TimeoutExpired after 60 s.
    """
    done = subprocess.run(
        [python, "-I", "-c", program],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        timeout=60,
        check=False,
        env={},
    )
    if done.returncode:
        raise OSError(f"{python} does not start: {done.stderr[-200:].decode(errors='replace')}")
    return json.loads(done.stdout)


def copy_python(view: View, root: Path) -> None:
    """Copy an interpreter, its standard library and shared libraries to the same paths in `root`.

    About 50 MB, as hard links where `root` is on the same disk. Packages and rarely used parts of
    the library (_NOT_COPIED) are left out. Runs the interpreter; raises OSError, or
    subprocess.TimeoutExpired after 60 s.
    """
    libraries = set(_run_for_json(view.python, _LIBRARIES))
    shutil.copytree(
        view.stdlib,
        _path_inside(root, view.stdlib),
        ignore=_NOT_COPIED,
        symlinks=True,
        copy_function=_link_or_copy,
    )
    files = libraries | {view.python} | {p for p in [LIBRARY_CACHE] if os.path.isfile(p)}
    for path in files:
        target = _path_inside(root, path)
        if not target.exists():
            target.parent.mkdir(parents=True, exist_ok=True)
            _link_or_copy(path, str(target))
    for link in filter(os.path.islink, SYSTEM):  # /lib64 -> usr/lib64
        _link_inside(root, link, os.readlink(link))
    # Programs name a library and the loader by links: libz.so.1, /lib64/ld-linux-x86-64.so.2.
    for folder in {os.path.realpath(p) for p in (*map(os.path.dirname, libraries), *SYSTEM)}:
        for entry in os.scandir(folder):
            if entry.is_symlink() and (real := os.path.realpath(entry.path)) in libraries:
                _link_inside(root, entry.path, real)


def _link_or_copy(source: str, target: str) -> str:
    """Hard-link a file, and return `target`; copy it if linking fails, as on another disk.

    Also copy it if group or others may write to it, because the program runs as another user.
    """
    if not os.stat(source).st_mode & 0o022:
        with contextlib.suppress(OSError):  # of another disk
            os.link(source, target)
            return target
    return str(shutil.copy(source, target))


def _link_inside(root: Path, path: str, to: str) -> None:
    link = _path_inside(root, path)
    if not os.path.lexists(link):
        link.parent.mkdir(parents=True, exist_ok=True)
        link.symlink_to(to)


def _path_inside(root: Path, path: str) -> Path:
    return root / path.lstrip("/")
