"""The files that a program sees: one Python, the system's libraries, and nothing of a user."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

SYSTEM = ("/usr", "/lib", "/lib64", "/bin")
LIBRARY_CACHE = "/etc/ld.so.cache"
DEVICES = ("null", "zero", "full", "random", "urandom")
PROGRAM = "/box/program.py"
SCRATCH = "/tmp"

# Report where a Python and its shared libraries are. It imports each extension module, so that
# the libraries of all of them are mapped.
_REPORT = """
import importlib, json, os, sys, sysconfig
stdlib = sysconfig.get_path("stdlib")
dynamic = os.path.join(stdlib, "lib-dynload")
for name in sorted({file.split(".")[0] for file in os.listdir(dynamic)}):
    if not name.startswith(("_test", "_xx", "xx", "_tkinter", "_crypt", "nis")):
        try:
            importlib.import_module(name)
        except ImportError:
            pass
with open("/proc/self/maps") as maps:
    mapped = {line.split(None, 5)[5].strip() for line in maps if line.count("/")}
print(json.dumps({
    "executable": os.path.realpath(sys.executable), "stdlib": os.path.realpath(stdlib),
    "prefixes": [os.path.realpath(path) for path in (sys.prefix, sys.base_prefix)],
    "libraries": sorted(path for path in mapped if ".so" in path and os.path.isfile(path)),
}))
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
    """python: the interpreter, packages: whether programs can import those installed for it
    folders: what is shown read-only; a link stays one

    stdlib, libraries: the other parts that a copy needs
    """

    python: str
    packages: bool
    folders: tuple[str, ...]
    stdlib: str
    libraries: tuple[str, ...]

    def command(self, program: str) -> list[str]:
        """Return the arguments that run a program as `__main__`, its file being `program`."""
        without = [] if self.packages else ["-S"]
        return [self.python, "-s", *without, "-c", _RUN, program]


def look_at(python: str, packages: bool) -> View:
    """Ask an interpreter where its files are.

    Errors: OSError where it does not start, ValueError where its files are all of a home.
    """
    command = [python, "-I", "-c", _REPORT]
    done = subprocess.run(
        command, stdin=subprocess.DEVNULL, capture_output=True, timeout=60, check=False, env={}
    )
    if done.returncode:
        raise OSError(f"{python} does not start: {done.stderr[-200:].decode(errors='replace')}")
    found = json.loads(done.stdout)
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
        libraries=tuple(found["libraries"]),
    )


def copy_python(view: View, root: Path) -> None:
    """Copy an interpreter, its standard library and shared libraries to the same places in `root`.

    About 50 MB. No site-packages, no other program.
    """
    _copy_file(view.python, root)
    shutil.copytree(view.stdlib, _inside(root, view.stdlib), ignore=_NOT_COPIED, symlinks=True)
    for library in view.libraries:
        if not _inside(root, library).exists():
            _copy_file(library, root)
    for link in SYSTEM:  # the loader is named by the links of the system: /lib64 -> usr/lib64
        if os.path.islink(link) and not os.path.lexists(_inside(root, link)):
            _inside(root, link).symlink_to(os.readlink(link))
    # Programs name a library and the loader by links: libz.so.1, /lib64/ld-linux-x86-64.so.2.
    for folder in {os.path.realpath(p) for p in (*map(os.path.dirname, view.libraries), *SYSTEM)}:
        for entry in os.scandir(folder):
            if entry.is_symlink() and (real := os.path.realpath(entry.path)) in view.libraries:
                _inside(root, folder).mkdir(parents=True, exist_ok=True)
                _inside(root, entry.path).symlink_to(real)
    if os.path.isfile(LIBRARY_CACHE):
        _copy_file(LIBRARY_CACHE, root)


def _copy_file(path: str, root: Path) -> None:
    target = _inside(root, path)
    target.parent.mkdir(parents=True, exist_ok=True)
    shutil.copy(path, target)


def _inside(root: Path, path: str) -> Path:
    return root / path.lstrip("/")
