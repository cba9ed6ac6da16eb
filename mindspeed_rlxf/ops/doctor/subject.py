"""What is examined: a configuration's devices, files and room, or a run in general."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from mindspeed_rlxf.config.enums import DeviceKind
from mindspeed_rlxf.config.schema import RunConfig
from mindspeed_rlxf.run.directory import RunDirectory

OUTPUTS = "outputs"


@dataclass(frozen=True)
class Subject:
    """Travels to every host.

    output_dir:    of the run; absolute
    paths:         (key of the configuration, file or folder that the run reads), `*` for a rest
    several_hosts: collectives have to reach other hosts
    resource:      of Ray for one device; None = that of the kind
    """

    kind: DeviceKind
    output_dir: str
    paths: tuple[tuple[str, str], ...] = ()
    several_hosts: bool = False
    resource: str | None = None


def subject_of(config: RunConfig | None, kind: DeviceKind, several_hosts: bool) -> Subject:
    """kind: overrides that of the configuration unless it is `auto`."""
    if config is None:
        return Subject(kind, str(Path(OUTPUTS).absolute()), (), several_hosts)
    return Subject(
        kind if kind is not DeviceKind.AUTO else config.device.kind,
        str(RunDirectory.choose(config).path),
        tuple((key, str(Path(path).absolute())) for key, path in _paths(config)),
        several_hosts,
        config.device.resource_name,
    )


def _paths(config: RunConfig) -> Iterator[tuple[str, str]]:
    yield "training.tokenizer_name_or_path", _tokenizer(config.training.tokenizer_name_or_path)
    for role in config.roles:
        folder = config.role(role).load
        if folder is not None:
            yield f"{role.value}.load", folder
    data = config.data
    for key, names in (("train_files", data.train_files), ("val_files", data.val_files)):
        yield from ((f"data.{key}", name) for name in names)
    for key, prefixes in (("data_path", data.data_path), ("val_data_path", data.val_data_path)):
        yield from ((f"data.{key}", f"{prefix}_packed_*") for prefix in prefixes)
    if config.actor_rollout.fixed_responses is not None:
        yield "actor_rollout.fixed_responses", config.actor_rollout.fixed_responses


def _tokenizer(name: str) -> str:
    """The folder, or where the cache of Hugging Face has the model of this name."""
    home = Path(os.environ.get("HF_HOME") or Path.home() / ".cache" / "huggingface")
    cached = home / "hub" / f"models--{name.replace('/', '--')}"
    return name if Path(name).exists() or not cached.exists() else str(cached)
