"""Keys that earlier versions had, with what to do now; `unknown_key` refuses them by name."""

from __future__ import annotations

REMOVED: dict[str, str] = {}
"""`section.key` -> fix, a clause such as "remove it: output_dir must be on shared storage"."""
