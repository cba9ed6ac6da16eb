"""Versions of the packages of a process, and the comparison of those of several hosts."""

from __future__ import annotations

import functools
import hashlib
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import mindspeed_rlxf
from mindspeed_rlxf import packages

OURS = "mindspeed_rlxf"
NONE = "none"  # the version of what is not installed


@functools.cache
def build_id() -> str:
    """Return the version with a hash of all sources: `0.1.0, sources 3f2a91c07d4e`."""
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
    """Return the versions of this package and of others, by name."""
    return {OURS: build_id(), **{name: packages.version(name) or NONE for name in names}}


@dataclass(frozen=True)
class Difference:
    """Hosts that have another version of one package than they should.

    expected: the version, which `others` of the hosts have
    """

    name: str
    value: str
    hosts: tuple[str, ...]
    expected: str
    others: int


def differences(
    by_host: Iterable[tuple[str, Mapping[str, str]]], expected: Mapping[str, str] | None = None
) -> list[Difference]:
    """Compare versions with the expected ones, else with those of most hosts.

    The local part of a version does not count. It names the build, as 2.7.1+cpu on a head node
    without devices.

    by_host: versions by name, of each host
    """
    by_host, found = list(by_host), []
    for name in dict.fromkeys(name for _, there in by_host for name in there):
        values = {host: there.get(name, NONE) for host, there in by_host}
        counts = Counter(map(_public, values.values()))
        usual = next(v for v in values.values() if _public(v) == counts.most_common(1)[0][0])
        wanted = (expected or {}).get(name, usual)
        odd = dict.fromkeys(v for v in values.values() if _public(v) != _public(wanted))
        for value in odd:
            hosts = tuple(host for host, there in values.items() if there == value)
            found.append(Difference(name, value, hosts, wanted, counts[_public(wanted)]))
    return found


def _public(version: str) -> str:
    return version.partition("+")[0]
