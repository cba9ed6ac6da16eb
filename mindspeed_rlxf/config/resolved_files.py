"""Find and read the resolved configurations that a run has written."""

import os
from itertools import count, takewhile
from pathlib import Path

import yaml

from mindspeed_rlxf.config.keys import Tree


def read_resolved(training: Tree) -> Tree:
    """Return what a run in the folder `training.output_dir` was resolved to; {} without one."""
    if training.get("new_run") is True:
        return {}
    files = list_configs(Path(os.path.expanduser(str(training["output_dir"]))))
    if not files:
        return {}
    try:
        values = yaml.safe_load(files[-1].read_text(encoding="utf-8"))
    except (OSError, ValueError, yaml.YAMLError):  # reported later
        return {}
    return values if isinstance(values, dict) else {}


def list_configs(folder: Path) -> list[Path]:
    """Return the resolved configurations of a run, oldest first: config.yaml, config.1.yaml, ..."""
    return list(takewhile(Path.exists, (config_file(folder, number) for number in count())))


def config_file(folder: Path, num_changes: int) -> Path:
    """Return the file of a run's resolved configuration after so many changes."""
    return folder / (f"config.{num_changes}.yaml" if num_changes else "config.yaml")
