"""What the doctor checks: device kind, output folder and input files, of a configuration or not."""

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
    """The device kind, folder and files to check. Picklable: every host of a cluster gets it.

    output_dir:    absolute path of the run directory
    paths:         pairs (key of the configuration, path or glob pattern that the run reads)
    several_hosts: the run uses more than one host, so network checks need non-loopback addresses
    resource:      name of the Ray resource for one device; None = the default name of the kind
    """

    kind: DeviceKind
    output_dir: str
    paths: tuple[tuple[str, str], ...] = ()
    several_hosts: bool = False
    resource: str | None = None


def choose_subject(config: RunConfig | None, kind: DeviceKind, several_hosts: bool) -> Subject:
    """Return what to check: the device, run directory and input files of the configuration.

    config: None = no input files, and `./outputs` as the output folder
    kind:   replaces the configuration's; `auto` = take the configuration's
    Paths are made absolute; nothing is created.
    """
    if config is None:
        return Subject(kind, str(Path(OUTPUTS).absolute()), (), several_hosts)
    return Subject(
        kind if kind is not DeviceKind.AUTO else config.device.kind,
        str(RunDirectory.choose(config).path),
        tuple((key, str(Path(path).absolute())) for key, path in _input_paths(config) if path),
        several_hosts,
        config.device.resource_name,
    )


def _input_paths(config: RunConfig) -> Iterator[tuple[str, str]]:
    """Yield (key, path or glob pattern) of the inputs of a run.

    In this order: tokenizer, weights of each role, data files, packed data, fixed responses. A key
    with a list yields one pair per entry, none if it is empty; any other unset key has the path "".
    """
    training, data = config.training, config.data
    yield "training.tokenizer_name_or_path", _tokenizer_path(training.tokenizer_name_or_path)
    yield from ((f"{role.value}.load", config.role(role).load or "") for role in config.roles)
    for key in ("train_files", "val_files"):
        yield from ((f"data.{key}", name) for name in getattr(data, key))
    for key in ("data_path", "val_data_path"):
        yield from ((f"data.{key}", f"{prefix}_packed_*") for prefix in getattr(data, key))
    yield "actor_rollout.fixed_responses", config.actor_rollout.fixed_responses or ""


def _tokenizer_path(name: str) -> str:
    """Return `name`, or its folder in the Hugging Face cache if only that exists."""
    cached = huggingface_home() / "hub" / f"models--{name.replace('/', '--')}"
    return name if Path(name).exists() or not cached.exists() else str(cached)
