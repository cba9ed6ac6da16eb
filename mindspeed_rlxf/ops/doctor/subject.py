"""The subject of the checks: a configuration's devices, files and room, or a run in general."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from mindspeed_rlxf.config.enums import DeviceKind
from mindspeed_rlxf.config.schema import RunConfig
from mindspeed_rlxf.ops.doctor.disk import huggingface_home
from mindspeed_rlxf.run.directory import RunDirectory

OUTPUTS = "outputs"


@dataclass(frozen=True)
class Subject:
    """The device, folder and files to check. It is sent to every host.

    output_dir:    of the run; absolute
    paths:         (key of the configuration, file, folder or pattern that the run reads)
    several_hosts: collectives have to reach other hosts
    resource:      of Ray for one device; None = that of the kind
    """

    kind: DeviceKind
    output_dir: str
    paths: tuple[tuple[str, str], ...] = ()
    several_hosts: bool = False
    resource: str | None = None


def choose_subject(config: RunConfig | None, kind: DeviceKind, several_hosts: bool) -> Subject:
    """Take devices and files from the configuration, where there is one.

    kind: overrides that of the configuration unless it is `auto`
    """
    if config is None:
        return Subject(kind, str(Path(OUTPUTS).absolute()), (), several_hosts)
    return Subject(
        kind if kind is not DeviceKind.AUTO else config.device.kind,
        str(RunDirectory.choose(config).path),
        tuple((key, str(Path(path).absolute())) for key, path in _paths(config) if path),
        several_hosts,
        config.device.resource_name,
    )


def _paths(config: RunConfig) -> Iterator[tuple[str, str]]:
    """Yield (key, file or pattern) for everything that the run reads; may be empty text."""
    training, data = config.training, config.data
    yield "training.tokenizer_name_or_path", _tokenizer(training.tokenizer_name_or_path)
    yield from ((f"{role.value}.load", config.role(role).load or "") for role in config.roles)
    for key in ("train_files", "val_files"):
        yield from ((f"data.{key}", name) for name in getattr(data, key))
    for key in ("data_path", "val_data_path"):
        yield from ((f"data.{key}", f"{prefix}_packed_*") for prefix in getattr(data, key))
    yield "actor_rollout.fixed_responses", config.actor_rollout.fixed_responses or ""


def _tokenizer(name: str) -> str:
    """Return the folder, or the cached model of this name where there is one."""
    cached = huggingface_home() / "hub" / f"models--{name.replace('/', '--')}"
    return name if Path(name).exists() or not cached.exists() else str(cached)
