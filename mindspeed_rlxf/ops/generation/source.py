"""Find the model to generate with: a run's policy, one checkpoint of a run, or a weight folder."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

from mindspeed_rlxf.checkpoint.directory import RunDirectory
from mindspeed_rlxf.checkpoint.store import CONFIG, TRAINER, Checkpoint, RunStore
from mindspeed_rlxf.config.enums import Role
from mindspeed_rlxf.config.hf_config import (
    approximate_architecture,
    find_unsupported,
    parse_architecture,
    read_hf_config,
)
from mindspeed_rlxf.config.problems import Problem, UserError, neighbours, use
from mindspeed_rlxf.config.schema import (
    SAVED_AS,
    ActorConfig,
    ArchitectureConfig,
    DataConfig,
)
from mindspeed_rlxf.weights.formats import STATE_FILES
from mindspeed_rlxf.weights.state_files import MANIFEST

RUN_KEYS = (
    "do_sample", "temperature", "top_k", "top_p", "min_new_tokens", "max_new_tokens",
    "max_prompt_length", "stop_token_ids", "stop_strings", "num_samples_per_step", "bf16",
    "fp32_head", "trust_files", "lora",
)  # fmt: skip
"""Keys of a run's actor that decide what it generates."""
MODEL_KEYS = ("do_sample", "temperature", "top_k", "top_p", "max_new_tokens")
"""Keys of generation_config.json with the same meaning."""
NEW_TOKENS = 256  # at most, where neither a run nor generation_config.json says it
SEED = 1234
ACTOR = SAVED_AS[Role.ACTOR_ROLLOUT]


@dataclass(frozen=True)
class ModelSource:
    """A model to generate with.

    Attributes:
        actor: `load` is the folder with config.json; the rest says how to sample.
        adapters: Folder of a run's state with adapters of the weights in `actor.load`; None = the
            weights are complete.
        tokenizer: Folder of the tokenizer.
        data: How a run reads its prompts.
        seed: Of a run.
        is_native: Whether the native engine knows the model.
        description: Where the weights come from, for people.
    """

    actor: ActorConfig
    adapters: Path | None
    tokenizer: str
    data: DataConfig
    seed: int
    is_native: bool
    description: str


def find_source(
    path: Path, changes: Mapping[str, Any], iteration: int | None = None
) -> ModelSource:
    """Return the model in a folder, without reading weights.

    Args:
        path: A run directory (its newest checkpoint counts), a checkpoint of a run, or a folder of
            weights with config.json.
        changes: Keys of the actor that replace those of the run.
        iteration: Of the run's checkpoint; None = the newest.

    Raises:
        UserError: It is none of these, or has no weights that can be read.
    """
    checkpoint = _find_checkpoint(path, iteration)
    if checkpoint is not None:
        return _of_checkpoint(path, checkpoint, changes)
    if not (path / "config.json").is_file():
        rule = "must be a run directory, a checkpoint of a run, or a folder with config.json"
        remedy = "give the folder that training.output_dir names, or one of a Hugging Face model"
        raise UserError(Problem("SOURCE", rule, repr(str(path)), remedy))
    try:
        hf_config = read_hf_config(path)
    except ValueError as error:
        raise UserError(Problem("SOURCE", str(error), colon=True)) from None
    max_positions = hf_config.get("max_position_embeddings", 2 * NEW_TOKENS)
    new_tokens = min(NEW_TOKENS, max_positions // 2)
    keys = {"max_new_tokens": new_tokens, **_read_generation_config(path), **changes}
    keys.setdefault("bf16", hf_config.get("dtype", hf_config.get("torch_dtype")) == "bfloat16")
    actor, is_native = _make_actor(path, keys)
    data = DataConfig(train_files=("none",), default_data_source="unnamed")
    return ModelSource(actor, None, str(path), data, SEED, is_native, str(path))


def _find_checkpoint(path: Path, iteration: int | None) -> Path | None:
    """Return the checkpoint that `path` is or has; None if it is no run's.

    A run's is that of `iteration`, or the newest. Raises UserError for a run without a whole one.
    """
    if iteration is not None and not RunDirectory(path).config.is_file():
        remedy = f"give the run directory, not {path}"
        raise UserError(Problem("--checkpoint", "needs a run directory", iteration, remedy))
    if path.name == ACTOR and (path.parent / MANIFEST).is_file():
        return path.parent
    if (path / MANIFEST).is_file() and (path / ACTOR).is_dir():
        return path
    directory = RunDirectory(path)
    if not directory.config.is_file():
        return None
    checkpoints = RunStore(directory.checkpoints).newest_first()
    if iteration is not None:
        paths = {}
        for checkpoint in checkpoints:
            if _is_complete(checkpoint):
                paths[checkpoint.iteration] = checkpoint.path
        if iteration not in paths:
            rule = f"must be the iteration of a whole checkpoint in {directory.checkpoints}"
            remedy = use(neighbours(iteration, paths)) if paths else "wait for the first one"
            raise UserError(Problem("--checkpoint", rule, iteration, remedy))
        return paths[iteration]
    for checkpoint in checkpoints:
        if _is_complete(checkpoint):
            return checkpoint.path
    rule = "must have a whole checkpoint in checkpoints/"
    remedy = "wait for the first one (training.save_interval), or give the weights it started from"
    raise UserError(Problem("SOURCE", rule, repr(str(path)), remedy))


def _is_complete(checkpoint: Checkpoint) -> bool:
    try:
        checkpoint.read()
    except (ValueError, OSError):
        return False
    return True


def _of_checkpoint(path: Path, checkpoint: Path, changes: Mapping[str, Any]) -> ModelSource:
    """Return the policy of a checkpoint, with the keys that its run had then.

    Checkpoints of other engines than Megatron's hold no weights that one process reads; a finished
    run has them in `final/`.
    """
    try:
        tree = dict(yaml.safe_load((checkpoint / TRAINER / CONFIG).read_text(encoding="utf-8")))
        section = dict(tree["actor_rollout"])
        data_keys = {}
        for key, value in dict(tree["data"]).items():
            if value != DataConfig.model_fields[key].get_default():
                data_keys[key] = value
        data = DataConfig(**data_keys)
        training = dict(tree["training"])
    except (OSError, ValueError, TypeError, KeyError, yaml.YAMLError) as error:
        rule = f"must have the configuration of its run ({type(error).__name__}: {error})"
        raise UserError(
            Problem(f"{checkpoint / TRAINER / CONFIG}", rule, remedy="give final/actor_hf")
        ) from None
    folder = checkpoint / ACTOR
    adapters = None
    keys = {name: section[name] for name in RUN_KEYS if name in section} | dict(changes)
    if not any(folder.glob(STATE_FILES)):
        folder = _find_exported(path, checkpoint, section)
        keys.pop("lora", None)  # merged in an export
    elif section.get("lora", {}).get("rank"):
        adapters = folder
        folder = Path(section["load"])
    actor, is_native = _make_actor(folder, keys)
    if data.default_data_source is None:  # rows need none, as nothing scores them
        data = data.model_copy(update={"default_data_source": "unnamed"})
    tokenizer = str(training["tokenizer_name_or_path"])
    if not Path(tokenizer).is_dir():  # the checkpoint was copied from elsewhere
        tokenizer = str(checkpoint / ACTOR)
    seed = int(training.get("seed", SEED))
    description = str(folder if adapters is None else adapters)
    return ModelSource(actor, adapters, tokenizer, data, seed, is_native, description)


def _find_exported(path: Path, checkpoint: Path, section: Mapping[str, Any]) -> Path:
    """Return the final weights of a run whose checkpoints cannot be read by one process."""
    run = checkpoint.parents[1]
    exported = run / "final" / f"{ACTOR}_hf"
    iteration = RunStore(checkpoint.parent).exported()
    if iteration is not None and checkpoint.name == f"iter_{iteration:07d}" and exported.is_dir():
        return exported
    rule = (
        f"holds the sharded state of backend={section.get('backend')}, which generate cannot read"
    )
    remedy = f"give {exported} once the run is finished"
    raise UserError(Problem("SOURCE", rule, repr(str(path)), remedy))


def _make_actor(folder: Path, keys: Mapping[str, Any]) -> tuple[ActorConfig, bool]:
    """Return the actor's section for a folder, and whether the native engine knows the model."""
    try:
        config = read_hf_config(folder)
        is_native = not find_unsupported(config)
        fields = parse_architecture(config) if is_native else approximate_architecture(folder)
        architecture = ArchitectureConfig(**{k: v for k, v in fields.items() if v is not None})
    except ValidationError as error:
        raise UserError(_describe(error, f"{folder}/config.json")) from None
    except ValueError as error:
        raise UserError(Problem("SOURCE", str(error), colon=True)) from None
    try:
        backend = "megatron" if is_native else "fsdp"
        fields = {
            "model": folder.name, "architecture": architecture, "backend": backend,
            "load": str(folder), **keys,
        }  # fmt: skip
        return ActorConfig(**fields), is_native
    except ValidationError as error:
        raise UserError(_describe(error, "")) from None


def _describe(error: ValidationError, file: str) -> list[Problem]:
    """Return the problems of options, or with `file` of that file."""
    problems: list[Problem] = []
    for details in error.errors():
        key = ".".join(map(str, details["loc"]))
        if details["type"] == "value_error":  # broken rules of a section
            problems += details["ctx"]["error"].problems
        elif file:
            problems.append(Problem(file, f"{key}: {details['msg']}", colon=True))
        else:
            problems.append(Problem(key, details["msg"], details["input"]))
    return problems


def _read_generation_config(folder: Path) -> dict[str, Any]:
    """Return how a model's generation_config.json samples; {} without the file."""
    file = folder / "generation_config.json"
    if not file.exists():
        return {}
    try:
        settings = dict(json.loads(file.read_bytes()))
    except (OSError, ValueError, TypeError) as error:
        rule = f"must be a JSON object ({error})"
        raise UserError(Problem(f"{file}", rule, remedy="repair or remove it")) from None
    return {name: settings[name] for name in MODEL_KEYS if settings.get(name) is not None}
