"""Compare the weights that were sent to another process with those that it has."""

from collections.abc import Mapping, Sequence
from typing import Any


class SyncError(RuntimeError):
    """A process does not have the weights that it should have."""


def compare_receipts(
    known: Mapping[str, int],
    sent: Mapping[str, int],
    workers: Sequence[Mapping[str, Any]],
    version: int,
) -> None:
    """Compare bit sums by name with workers' receipts; `known` are those of the last update.

    Raises:
        SyncError: Other tensors were sent than before, or a worker lacks a tensor, or got it twice,
            or it or another one with other bits, or holds something else; names the tensors.
    """
    for worker in workers:
        received, loaded = worker["received"], worker["loaded"]
        wrong = {
            "not sent, unlike in the last update": [n for n in known if n not in sent],
            "sent, unlike in the last update": [n for n in sent if n not in known],
            "not received": [n for n in sent if n not in received],
            "received, but never sent": [n for n in received if n not in sent],
            "received twice": [n for n, sums in received.items() if len(sums) > 1],
            "received with other bits than were sent": [
                n for n in sent if received.get(n, [sent[n]])[0] != sent[n]
            ],
            "loaded, but never sent": [n for n in loaded if n not in sent],
            "loaded with other bits": [n for n in loaded if loaded[n] != sent.get(n)],
            "packed before this update": worker["stale"],
        }
        for how, names in wrong.items():
            if names:
                more = f" and {len(names) - 3} more" if len(names) > 3 else ""
                text = f"{', '.join(names[:3])}{more}: {how}"
                raise SyncError(f"weights of version {version}: {text}")
        if worker["version"] != str(version):
            raise SyncError(f"the server has version {worker['version']!r}, not {version}")


def summary(before: Mapping[str, int], sent: Mapping[str, int]) -> dict[str, Any]:
    """Return what a line of sync.jsonl says of the sums that were sent.

    `changed` counts tensors with other bits than in the update before, if there was one; `first`
    names the first tensor; `total` is the sum of all sums.
    """
    return {
        "tensors": len(sent),
        "changed": sum(sent[name] != before[name] for name in sent) if before else None,
        "first": next(iter(sent)),
        "total": sum(sent.values()) % 2**63,
    }
