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
from mindspeed_rlxf.config.problems import Problem, UserError
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
    "trust_files", "lora",
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
        shown: Where the weights come from, for people.
    """

    actor: ActorConfig
    adapters: Path | None
    tokenizer: str
    data: DataConfig
    seed: int
    is_native: bool
    shown: str


def find_source(path: Path, changes: Mapping[str, Any]) -> ModelSource:
    """Return the model in a folder, without reading weights.

    Args:
        path: A run directory (its newest checkpoint counts), a checkpoint of a run, or a folder of
            weights with config.json.
        changes: Keys of the actor that replace those of the run.

    Raises:
        UserError: It is none of these, or has no weights that can be read.
    """
    checkpoint = _find_checkpoint(path)
    if checkpoint is not None:
        return _of_checkpoint(path, checkpoint, changes)
    if not (path / "config.json").is_file():
        rule = "must be a run directory, a checkpoint of a run, or a folder with config.json"
        remedy = "give the folder that training.output_dir names, or one of a Hugging Face model"
        raise UserError(Problem("SOURCE", rule, repr(str(path)), remedy))
    try:
        described = read_hf_config(path)
    except ValueError as error:
        raise UserError(Problem("SOURCE", str(error), colon=True)) from None
    positions = described.get("max_position_embeddings", 2 * NEW_TOKENS)
    new_tokens = min(NEW_TOKENS, positions // 2)
    keys = {"max_new_tokens": new_tokens, **_read_generation_config(path), **changes}
    keys.setdefault("bf16", described.get("dtype", described.get("torch_dtype")) == "bfloat16")
    actor, is_native = _make_actor(path, keys)
    data = DataConfig(train_files=("none",), default_data_source="unnamed")
    return ModelSource(actor, None, str(path), data, SEED, is_native, str(path))


def _find_checkpoint(path: Path) -> Path | None:
    """Return the checkpoint that `path` is or has, the newest of a run; None if it is no run's.

    Raises UserError for a run without a whole checkpoint.
    """
    if path.name == ACTOR and (path.parent / MANIFEST).is_file():
        return path.parent
    if (path / MANIFEST).is_file() and (path / ACTOR).is_dir():
        return path
    directory = RunDirectory(path)
    if not directory.config.is_file():
        return None
    for checkpoint in RunStore(directory.checkpoints).newest_first():
        if _is_whole(checkpoint):
            return checkpoint.path
    rule = "must have a whole checkpoint in checkpoints/"
    remedy = "wait for the first one (training.save_interval), or give the weights it started from"
    raise UserError(Problem("SOURCE", rule, repr(str(path)), remedy))


def _is_whole(checkpoint: Checkpoint) -> bool:
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
        section, defaults = dict(tree["actor_rollout"]), DataConfig.model_fields
        given = {k: v for k, v in dict(tree["data"]).items() if v != defaults[k].get_default()}
        data = DataConfig(**given)
        training = dict(tree["training"])
    except (OSError, ValueError, TypeError, KeyError, yaml.YAMLError) as error:
        rule = f"must have the configuration of its run ({type(error).__name__}: {error})"
        raise UserError(
            Problem(f"{checkpoint / TRAINER / CONFIG}", rule, remedy="give final/actor_hf")
        ) from None
    folder, adapters = checkpoint / ACTOR, None
    keys = {name: section[name] for name in RUN_KEYS if name in section} | dict(changes)
    if not any(folder.glob(STATE_FILES)):
        folder = _find_exported(path, checkpoint, section)
        keys.pop("lora", None)  # merged in an export
    elif section.get("lora", {}).get("rank"):
        folder, adapters = Path(section["load"]), folder
    actor, is_native = _make_actor(folder, keys)
    if data.default_data_source is None:  # rows need none, as nothing scores them
        data = data.model_copy(update={"default_data_source": "unnamed"})
    tokenizer = str(training["tokenizer_name_or_path"])
    if not Path(tokenizer).is_dir():  # the checkpoint was copied from elsewhere
        tokenizer = str(checkpoint / ACTOR)
    seed = int(training.get("seed", SEED))
    shown = str(folder if adapters is None else adapters)
    return ModelSource(actor, adapters, tokenizer, data, seed, is_native, shown)


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


def _describe(error: ValidationError, where: str) -> list[Problem]:
    problems = []
    for each in error.errors():
        key = ".".join(map(str, each["loc"])) or where
        text = each["msg"] if each["loc"] and not where else f"{key}: {each['msg']}"
        problems.append(Problem(where or key, text, each["input"] if not where else None))
    return problems


def _read_generation_config(folder: Path) -> dict[str, Any]:
    """Return how a model's generation_config.json samples; {} without the file."""
    file = folder / "generation_config.json"
    if not file.exists():
        return {}
    try:
        found = dict(json.loads(file.read_bytes()))
    except (OSError, ValueError, TypeError) as error:
        rule = f"must be a JSON object ({error})"
        raise UserError(Problem(f"{file}", rule, remedy="repair or remove it")) from None
    return {name: found[name] for name in MODEL_KEYS if found.get(name) is not None}
