"""Versions of the packages of a process, and their comparison between hosts."""

from __future__ import annotations

import functools
import hashlib
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import mindspeed_rlxf
from mindspeed_rlxf.config import packages

OURS = "mindspeed_rlxf"
NONE = "none"  # the version of what is not installed


@functools.cache
def build_id() -> str:
    """Return this package's version with a hash of its sources: `0.1.0, sources 3f2a91c07d4e`."""
    sources = hash_sources(Path(mindspeed_rlxf.__file__).parent)
    return f"{mindspeed_rlxf.__version__}, sources {sources}"


def hash_sources(folder: Path) -> str:
    """Hash the names and contents of the Python files below a folder; 12 hexadecimal digits."""
    hashed = hashlib.sha256()
    for file in sorted(folder.rglob("*.py"), key=lambda file: file.relative_to(folder).as_posix()):
        hashed.update(file.relative_to(folder).as_posix().encode() + b"\0")
        hashed.update(hashlib.sha256(file.read_bytes()).digest())
    return hashed.hexdigest()[:12]


def versions(names: Sequence[str]) -> dict[str, str]:
    """Return the versions of this package (`build_id`) and of `names`, by name.

    "none" = not installed.
    """
    return {OURS: build_id(), **{name: packages.version(name) or NONE for name in names}}


@dataclass(frozen=True)
class Difference:
    """A version of one package that differs from the expected one, and the hosts that have it.

    value:  the differing version
    hosts:  hosts with that version
    others: number of hosts with the expected version
    """

    name: str
    value: str
    hosts: tuple[str, ...]
    expected: str
    others: int


def find_differences(
    by_host: Iterable[tuple[str, Mapping[str, str]]], expected: Mapping[str, str] | None = None
) -> list[Difference]:
    """Return a Difference for each package and each version of it that is not the expected one.

    It lists the hosts with that version. A host that does not list a package has version NONE of
    it; a package that no host lists is not compared. What follows a `+` does not count: 2.7.1+cpu,
    as on a head node without devices, equals 2.7.1.
    by_host:  (host, its versions by package name)
    expected: version by package name; a package not in it is expected as on most hosts
    """
    by_host, found = list(by_host), []
    usual = usual_versions([installed for _, installed in by_host])
    for name in usual:
        values = [(host, installed.get(name, NONE)) for host, installed in by_host]
        counts = Counter(_public(version) for _, version in values)
        wanted = (expected or {}).get(name, usual[name])
        odd = dict.fromkeys(v for _, v in values if _public(v) != _public(wanted))
        for value in odd:
            hosts = tuple(dict.fromkeys(host for host, version in values if version == value))
            found.append(Difference(name, value, hosts, wanted, counts[_public(wanted)]))
    return found


def usual_versions(all_installed: Sequence[Mapping[str, str]]) -> dict[str, str]:
    """Return by name the version that most hosts have, the first of equally frequent ones.

    all_installed: versions by package name of each host; a package that a host lacks has NONE there
    """
    found = {}
    for name in dict.fromkeys(name for installed in all_installed for name in installed):
        values = [installed.get(name, NONE) for installed in all_installed]
        (most, _), *_ = Counter(map(_public, values)).most_common(1)
        found[name] = next(version for version in values if _public(version) == most)
    return found


def _public(version: str) -> str:
    return version.partition("+")[0]
