"""Read YAML."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import yaml

MAX_BYTES = -1


def read_yaml(path: str | os.PathLike[str]) -> Any:
    return yaml.safe_load(Path(path).read_text(encoding="utf-8"))


def parse_yaml(text: str) -> Any:
    return yaml.safe_load(text)
