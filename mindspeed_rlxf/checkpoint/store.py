"""The folder `checkpoints` of a run: find, check, publish and remove checkpoints.

A checkpoint is written to a hidden folder, which is renamed once everything is on the disk; then
the pointer file gets its iteration. A manifest lists every file with size and hash.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import secrets
import shutil
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mindspeed_rlxf.weights.atomic import sync_folder
from mindspeed_rlxf.weights.state_files import (
    MANIFEST,
    Entry,
    entries_below,
    patiently,
    size_problem,
    write_text,
)

FORMAT_VERSION = 1
POINTER = "latest_checkpointed_iteration.txt"
BEST = "best_checkpointed_iteration.txt"
EXPORTED = "exported_iteration.txt"
NAME = re.compile(r"iter_(\d{7,})")
REMOVED = ".removed"  # at the end of the hidden name of what is being removed
UNUSED = ".unused"  # behind the name of a checkpoint that was set aside


@dataclass(frozen=True)
class Checkpoint:
    """A folder with the name of a checkpoint; `read` checks whether it is complete."""

    path: Path
    iteration: int

    def read(self) -> Manifest:
        """Read the manifest and check the sizes, not the contents, of the files that it lists.

        Raises ValueError if the manifest is damaged or of another iteration, or a file is missing
        or of another size.
        """
        try:
            manifest = Manifest.from_json((self.path / MANIFEST).read_bytes(), MANIFEST)
        except FileNotFoundError:
            raise ValueError(f"{MANIFEST} is missing") from None
        if manifest.iteration != self.iteration:
            raise ValueError(f"{MANIFEST} is of iteration {manifest.iteration}")
        if found := list(filter(None, (size_problem(self.path, e) for e in manifest.files))):
            raise ValueError("; ".join(found))
        return manifest


@dataclass(frozen=True)
class Manifest:
    iteration: int
    files: list[Entry]
    about: dict[str, Any]
    """Versions and layouts that wrote the checkpoint; for people."""

    def part(self, name: str) -> list[Entry]:
        """Return the entries of one subfolder, with paths relative to it; [] for none."""
        return entries_below(name, self.files)

    def to_json(self) -> str:
        """Return the manifest as JSON, with format version and a hash of all other content."""
        content = {
            "format_version": FORMAT_VERSION,
            "iteration": self.iteration,
            **self.about,
            "files": self.files,
        }
        return json.dumps({**content, "sha256": _digest(content)}, indent=1) + "\n"

    @classmethod
    def from_json(cls, text: str | bytes, name: str) -> Manifest:
        """Parse the text of `to_json` and check its hash. name: of the file, for errors

        Raises ValueError if the text was changed, or has another format version.
        """
        try:
            tree = json.loads(text)
            stated, version = tree.pop("sha256"), tree["format_version"]
        except (ValueError, KeyError, AttributeError, TypeError):
            raise ValueError(f"{name} differs from what was written") from None
        if version != FORMAT_VERSION:
            raise ValueError(
                f"{name} has format_version {version}, this version reads {FORMAT_VERSION}"
            )
        if stated != _digest(tree):
            raise ValueError(f"{name} differs from what was written (sha256)")
        about = {k: v for k, v in tree.items() if k not in ("format_version", "iteration", "files")}
        return cls(tree["iteration"], tree["files"], about)


class RunStore:
    """The folder of one run's checkpoints, with files that name the latest, best and exported."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def newest_first(self) -> list[Checkpoint]:
        """Return the published checkpoints, newest first, unchecked; [] without the folder."""
        try:
            names = patiently(lambda: os.listdir(self.folder))
        except (FileNotFoundError, NotADirectoryError):
            return []
        found = [(NAME.fullmatch(name), self.folder / name) for name in names]
        named = [Checkpoint(path, int(match[1])) for match, path in found if match]
        return sorted(named, key=lambda each: -each.iteration)

    def hidden(self, iteration: int) -> Path:
        """Return the path of the hidden folder in which a checkpoint is written."""
        return self.folder / f".iter_{iteration:07d}"

    def path(self, iteration: int) -> Path:
        """Return the path of a published checkpoint."""
        return self.folder / f"iter_{iteration:07d}"

    def begin(self, iteration: int) -> Path:
        """Remove all unfinished checkpoints, make the hidden folder of a new one, and return it."""
        self.folder.mkdir(parents=True, exist_ok=True)
        self.clear_unfinished()
        hidden = self.hidden(iteration)
        hidden.mkdir()
        return hidden

    def clear_unfinished(self) -> list[str]:
        """Remove unfinished and half-removed checkpoints; return a line for each that stays."""
        return [said for path in self.folder.glob(".*") if (said := self._remove(path))]

    def _remove(self, path: Path) -> str:
        """Remove a folder, a file or a link, not a link's target; return why it stays, else "".

        It gets a hidden name first, so that no half-removed checkpoint has a checkpoint's name.
        Network file systems keep files that are open elsewhere (`.nfs*`): the next save tries
        again.
        """
        going = path
        try:
            if path.suffix != REMOVED:
                going = self.folder / f".{path.name}.{secrets.token_hex(4)}{REMOVED}"
                os.replace(path, going)
            if going.is_dir() and not going.is_symlink():
                shutil.rmtree(going, ignore_errors=True)
                going.rmdir()
            else:
                going.unlink()
        except OSError as error:
            if os.path.lexists(going):
                return f"{going} cannot be removed ({error.strerror}); the next save tries again"
        return ""

    def commit(self, manifest: Manifest) -> Path:
        """Publish a checkpoint: write the manifest, rename the hidden folder, update the pointer.

        Returns the final path. An older checkpoint of that name is renamed (`move_aside`).
        """
        hidden, final = self.hidden(manifest.iteration), self.path(manifest.iteration)
        write_text(hidden / MANIFEST, manifest.to_json())
        for folder in (hidden, *(path for path in hidden.rglob("*") if path.is_dir())):
            sync_folder(folder)
        if final.exists():  # damaged, or of a run that went back to before it
            self.move_aside(Checkpoint(final, manifest.iteration))
        os.replace(hidden, final)
        sync_folder(self.folder)
        self.point_to(manifest.iteration)
        return final

    def point_to(self, iteration: int) -> None:
        write_text(self.folder / POINTER, f"{iteration}\n")

    def point_to_best(self, best: Sequence[int]) -> None:
        """Write the best checkpoint's iteration to a file; [] removes the file."""
        if best:
            write_text(self.folder / BEST, f"{best[0]}\n")
        else:
            (self.folder / BEST).unlink(missing_ok=True)

    def move_aside(self, checkpoint: Checkpoint) -> Path:
        """Rename a checkpoint to NAME.unused, replacing an older one; return the new path."""
        aside = checkpoint.path.with_name(f"{checkpoint.path.name}{UNUSED}")
        if aside.exists():
            self._remove(aside)
        os.replace(checkpoint.path, aside)
        return aside

    def prune(self, keep_last: int, keep_every: int, best: Iterable[int] = ()) -> list[str]:
        """Remove all but the newest `keep_last`, multiples of `keep_every` (0 = none) and `best`.

        Also removes checkpoints that were set aside (`NAME.unused`), if they are of earlier
        iterations than the two newest that remain. Returns a line for each that cannot be removed.
        """
        found = self.newest_first()
        kept = {checkpoint.iteration for checkpoint in found[:keep_last]} | set(best)
        kept |= {
            each.iteration for each in found if keep_every and each.iteration % keep_every == 0
        }
        going = [checkpoint.path for checkpoint in found if checkpoint.iteration not in kept]
        oldest = min(sorted(kept & {each.iteration for each in found})[-2:], default=0)
        for folder in self.folder.glob(f"*{UNUSED}"):
            match = NAME.fullmatch(folder.name.removesuffix(UNUSED))
            if match and int(match[1]) < oldest:
                going.append(folder)
        return [said for path in going if (said := self._remove(path))]

    def exported(self) -> int | None:
        """Return the iteration whose weights were exported; None if no file says so."""
        try:
            return int(patiently((self.folder / EXPORTED).read_text))
        except (FileNotFoundError, ValueError):
            return None

    def set_exported(self, iteration: int) -> None:
        write_text(self.folder / EXPORTED, f"{iteration}\n")

    def clear_exported(self) -> None:
        (self.folder / EXPORTED).unlink(missing_ok=True)


def _digest(content: dict[str, Any]) -> str:
    text = json.dumps(content, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()
