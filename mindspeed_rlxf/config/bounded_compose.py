"""Bounds for what hydra and omegaconf read: bombs of aliases and of interpolations.

Hydra copies every alias and omegaconf every interpolation, so a file of a hundred lines can ask for
terabytes. Files are checked before hydra reads them. Interpolations are resolved here where there
are few of them, and in a process with a limit of time and memory where there are many.
"""

from __future__ import annotations

import io
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from hydra._internal.core_plugins.file_config_source import FileConfigSource
from hydra._internal.sources_registry import SourcesRegistry
from hydra.core.plugins import Plugins
from hydra.plugins.config_source import ConfigLoadError, ConfigResult, ConfigSource
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from mindspeed_rlxf.files.bounded import OutOfBoundsError, run_bounded
from mindspeed_rlxf.files.plain import read_text
from mindspeed_rlxf.files.plain_yaml import MAX_BYTES, check_yaml

FEW = 16  # interpolations: at worst they make a text some hundred times longer
MAX_TEXT = 4096  # characters of a value, where interpolations are resolved here
CPU_S, MEMORY_BYTES = 1, 2**30


class PlainFileSource(FileConfigSource):
    """Hydra's source of files, which checks them first."""

    def load_config(self, config_path: str) -> ConfigResult:
        name = self._normalize_file_name(config_path)
        file = os.path.realpath(os.path.join(self.path, name))
        if not os.path.exists(file):
            raise ConfigLoadError(f"Config not found : {file}")
        text = read_text(file, MAX_BYTES)
        check_yaml(text, file)
        stream = io.StringIO(text)
        stream.name = file  # what errors of the parser call it
        return ConfigResult(
            config=OmegaConf.load(stream),
            path=f"{self.scheme()}://{self.path}",
            provider=self.provider,
            header=ConfigSource._get_header_dict(text[:512]),
        )


@contextmanager
def checked_files() -> Iterator[None]:
    """Inside, hydra reads files through `PlainFileSource`."""
    Plugins.instance()  # registers its own sources, once
    known = SourcesRegistry.instance().types
    before = known["file"]
    known["file"] = PlainFileSource
    try:
        yield
    finally:
        known["file"] = before


def resolved(config: DictConfig) -> Any:
    """The plain tree of a composed configuration. Raises OmegaConfBaseException, ValueError."""
    texts = list(_texts(OmegaConf.to_container(config, resolve=False)))
    asking = sum(text.count("${") for text in texts)
    if asking <= FEW and (not asking or max(map(len, texts)) <= MAX_TEXT):
        return _resolve(config)
    try:
        found, problem = run_bounded(lambda: _outcome(config), CPU_S, MEMORY_BYTES)
    except OutOfBoundsError:
        bounds = f"{CPU_S} s and {MEMORY_BYTES >> 30} GiB"
        problem = f"its {asking} interpolations must resolve within {bounds}"
    if problem:
        raise ValueError(problem)
    return found


def _outcome(config: DictConfig) -> tuple[Any, str]:
    """(tree, "") or (None, problem)."""
    try:
        return _resolve(config), ""
    except (OmegaConfBaseException, ValueError) as error:
        return None, str(error)


def _resolve(config: DictConfig) -> Any:
    return OmegaConf.to_container(config, resolve=True, throw_on_missing=True)


def _texts(value: Any) -> Iterator[str]:
    """Every text of a tree, keys too."""
    open_ = [value]
    while open_:
        item = open_.pop()
        if isinstance(item, str):
            yield item
        elif isinstance(item, dict):
            open_ += [*item, *item.values()]
        elif isinstance(item, list):
            open_ += item
