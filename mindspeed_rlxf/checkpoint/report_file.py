"""Write HTML reports: report.html in the run directory, or a user-given file."""

import functools
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from mindspeed_rlxf.checkpoint import lock
from mindspeed_rlxf.checkpoint.directory import RunDirectory
from mindspeed_rlxf.checkpoint.store import RunStore
from mindspeed_rlxf.config.problems import Problem, UserError, printable
from mindspeed_rlxf.data.tokenizer import load_tokenizer, token_pieces
from mindspeed_rlxf.reporting.report.page import RunFolder, make_report
from mindspeed_rlxf.reporting.report.records import read_configs, read_iterations
from mindspeed_rlxf.reporting.report.samples import MAX_SAMPLES, TokenSplitter
from mindspeed_rlxf.weights.atomic import replace_file


def write_report(
    runs: Sequence[Path],
    file: Path,
    max_samples: int = MAX_SAMPLES,
    tokenizer: Any = None,
) -> int:
    """Write one HTML report on several runs, replacing the file; return its size in bytes.

    Shows `max_samples` samples over all runs. `tokenizer` None = each run's own, if it can be
    loaded. Raises UserError if a folder has no iteration.
    """
    split = None if tokenizer is None else functools.partial(token_pieces, tokenizer)
    folders = open_runs(runs, split)
    content = make_report(folders, max_samples).encode("utf-8", "backslashreplace")
    replace_file(file, content)
    return len(content)


def open_runs(runs: Sequence[Path], split: TokenSplitter | None = None) -> list[RunFolder]:
    """Return the runs to report on; UserError if a folder has no iteration.

    `split` splits strings into tokens; None = by each run's own tokenizer, if it can be loaded.
    """
    problems = [problem for problem in map(find_problem, runs) if problem is not None]
    if problems:
        raise UserError(problems)
    common_parent = os.path.commonpath([run.absolute().parent for run in runs])
    names = [printable(os.path.relpath(run, common_parent)) for run in runs]
    return [
        RunFolder(run, name, find_state(run), split or load_split(run))
        for run, name in zip(runs, names, strict=True)
    ]


def find_problem(run: Path) -> Problem | None:
    """Return why a folder has nothing to report; None if it has an iteration."""
    if run.is_dir() and read_iterations(run):
        return None
    rule = "must be a run directory with an iteration in metrics.jsonl"
    remedy = "wait for the first iteration, or give the folder that training.output_dir names"
    return Problem("RUN", rule, repr(str(run)), remedy)


def find_state(run: Path) -> str:
    """Return a run's state: "running", "failed", "finished" or "stopped"."""
    directory = RunDirectory(run.absolute())
    if lock.is_locked(directory.path):
        return "running"
    if directory.failure.exists():
        return "failed"
    exported = RunStore(directory.checkpoints).exported()
    iterations = read_iterations(run)
    is_finished = exported is not None and iterations and exported >= iterations[-1].number
    return "finished" if is_finished else "stopped"


def find_version(run: Path) -> str:
    """Return a string that changes with the run's state and its file sizes."""
    directory = RunDirectory(run)
    version = [find_state(run)]
    for file in (directory.metrics, directory.samples, directory.val_samples, directory.failure):
        if file.exists():
            version.append(f"{file.name} {file.stat().st_size}")
    return " ".join(version)


def load_split(run: Path) -> TokenSplitter | None:
    """Return a function splitting responses into tokens with the run's tokenizer.

    None without a token log, or if the tokenizer cannot be loaded.
    """
    configs = read_configs(run)
    path = configs[-1][1].get("training.tokenizer_name_or_path") if configs else None
    if not isinstance(path, str) or not (run / "samples_tokens").is_dir():
        return None
    try:
        return functools.partial(token_pieces, _load(path))
    except UserError:
        return None


_load = functools.lru_cache(maxsize=4)(load_tokenizer)
