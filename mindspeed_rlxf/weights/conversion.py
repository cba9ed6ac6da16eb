"""Check the arguments to `convert` against the folders on disk, and plan the conversion."""

import argparse
import math
from pathlib import Path

from mindspeed_rlxf.config.problems import Problem, UserError, closest
from mindspeed_rlxf.config.schema import SAVED_AS, ArchitectureConfig
from mindspeed_rlxf.weights.formats import FAMILIES, INDEX, SINGLE, Format, find_weights
from mindspeed_rlxf.weights.megatron_layout import make_layout
from mindspeed_rlxf.weights.tensor_conversion import (
    DTYPE_NAMES,
    Conversion,
    choose_head,
    open_source,
    read_architecture,
)


def plan_conversion(arguments: argparse.Namespace) -> Conversion:
    """Check the arguments, open the source and return the conversion; writes nothing.

    An existing target is no problem here.

    Raises:
        ValueError: invalid arguments, or an unusable source.
    """
    source, target, config = _check_folders(arguments)
    to = Format.HF if arguments.to == "hf" else Format(arguments.format or "torch")
    architecture, hf_config = read_architecture(config)
    _check_model(arguments, architecture, str(hf_config.get("model_type")))
    head = choose_head(hf_config, arguments.orm)
    layout = None
    if to is not Format.HF:
        layout = make_layout(
            architecture,
            arguments.tp,
            arguments.pp,
            arguments.ep,
            arguments.num_layers_per_virtual_pipeline_stage,
            _parse_layer_list(arguments.num_layer_list),
            arguments.make_vocab_size_divisible_by,
        )
    return Conversion(
        config=config,
        target=target,
        to=to,
        architecture=architecture,
        head=head,
        weights=open_source(source, architecture, head, arguments.trust_files),
        layout=layout,
        dtype=DTYPE_NAMES.get(arguments.params_dtype),
        shard_size=int(arguments.shard_size_gb * 1e9),
        replace=arguments.force,
    )


def _parse_layer_list(text: str | None) -> list[int] | None:
    """Return the layers per pipeline rank from `8,8,7,9`; None without --num-layer-list."""
    if text is None:
        return None
    try:
        return [int(number) for number in text.split(",")]
    except ValueError:
        rule = "must be numbers with commas between"
        raise UserError(Problem("--num-layer-list", rule, text, "write it like 8,8,7,9")) from None


def _check_folders(arguments: argparse.Namespace) -> tuple[Path, Path, Path]:
    """Check flags and folders; return source, target, and the config.json folder."""
    problems = []
    size = arguments.shard_size_gb
    if not 0 < size < math.inf:
        rule = "must be more than 0, and finite"
        problems.append(Problem("--shard-size-gb", rule, f"{size:g}", "use 4"))
    if arguments.to == "hf":
        sizes = {"--tp": arguments.tp, "--pp": arguments.pp, "--ep": arguments.ep}
        rank_flags = [f"{flag}={value}" for flag, value in sizes.items() if value != 1]
        if arguments.num_layer_list:
            rank_flags.append("--num-layer-list")
        if rank_flags:
            rule = "a Hugging Face folder has no ranks"
            problems.append(Problem(", ".join(rank_flags), rule, remedy="remove it", colon=True))
    for role, flag in (("source", "load_dir"), ("target", "save_dir")):
        if (getattr(arguments, role) is None) == (getattr(arguments, flag) is None):
            rule = f"or --{flag.replace('_', '-')} must be given, once"
            problems.append(Problem(role.upper(), rule, remedy="add or remove one"))
    if problems:
        raise UserError(problems)
    source = Path(arguments.source or arguments.load_dir)
    is_hf = _check_source(arguments, source)
    config, target = _find_config_and_target(arguments, source, is_hf)
    if target.resolve() in (source.resolve(), *source.resolve().parents):
        raise _error(target, f"must not be the source {source} or hold it", "give another folder")
    return source, target, config


def _check_source(arguments: argparse.Namespace, source: Path) -> bool:
    """Check the source; return whether it is a Hugging Face folder, or has no weights."""
    if not source.is_dir():
        raise _error(source, "must be a folder", "give the folder of the weights")
    kind, weights = find_weights(source)
    if kind is Format.HF and (source / "checkpoints").is_dir():  # a run directory
        _, weights = find_weights(source / "checkpoints")
    is_hf = kind is Format.HF
    roles = [name for name in SAVED_AS.values() if (weights / name).is_dir()]
    if roles and (weights / "manifest.json").is_file():
        rule = f"is a checkpoint of a run, which holds {' and '.join(roles)}"
        remedy = f"give {' or '.join(str(weights / role) for role in roles)}"
        raise _error(weights, rule, remedy)
    model_type = arguments.load_model_type
    if model_type is not None and (model_type == "hf") != is_hf:
        rule = f"must be that of {source}, a {'Hugging Face' if is_hf else 'Megatron'} folder"
        raise UserError(Problem("--load-model-type", rule, model_type, "correct one of them"))
    has_safetensors = (weights / SINGLE).exists() or (weights / INDEX).exists()
    if is_hf and has_safetensors and arguments.to == "hf":
        raise _error(source, "is a Hugging Face folder already", "use --to mg")
    return is_hf


def _find_config_and_target(
    arguments: argparse.Namespace, source: Path, is_hf: bool
) -> tuple[Path, Path]:
    """Return the config.json folder (--hf-config, else the source), and the target.

    As in the old tool, a --save-dir with a config.json and without --hf-config is the original
    folder, and its `mg2hf` is the target.
    """
    target = Path(arguments.target or arguments.save_dir)
    config = Path(arguments.hf_config) if arguments.hf_config else source
    has_config = (source / "config.json").exists()
    if arguments.to == "hf" and arguments.save_dir and not arguments.hf_config:
        if (target / "config.json").exists():
            return target, target / "mg2hf"
        if not has_config:
            rule = "must be the original Hugging Face folder, with config.json"
            raise UserError(Problem("--save-dir", rule, target, "give that, or --hf-config"))
    if config == source and not is_hf and not has_config:
        remedy = "give the original Hugging Face folder as --hf-config"
        raise _error(source, "must have a config.json that describes the model", remedy)
    return config, target


def _check_model(
    arguments: argparse.Namespace, architecture: ArchitectureConfig, model_type: str
) -> None:
    """Raise UserError for model flags that are unknown or contradict config.json."""
    problems = []
    remedy = "leave it out"
    family = arguments.model_type_hf
    if family is not None and family not in FAMILIES:
        guess = closest(family, FAMILIES)
        use_known = f"did you mean {guess}?" if guess else f"use {', '.join(FAMILIES)}"
        problems.append(Problem("--model-type-hf", "cannot be converted", family, use_known))
    elif family is not None and model_type not in FAMILIES[family]:
        rule = f"must agree with config.json, whose model_type is {model_type}"
        problems.append(Problem("--model-type-hf", rule, family, remedy))
    if arguments.add_qkv_bias and not architecture.add_qkv_bias:
        rule = f"model_type {model_type} has none"
        problems.append(Problem("--add-qkv-bias", rule, remedy=remedy, colon=True))
    if arguments.true_vocab_size not in (None, architecture.vocab_size):
        rule = f"must be the vocab_size={architecture.vocab_size} of config.json"
        problems.append(Problem("--true-vocab-size", rule, arguments.true_vocab_size, remedy))
    if problems:
        raise UserError(problems)


def _error(path: Path, rule: str, remedy: str) -> UserError:
    return UserError(Problem(f"{path}", rule, remedy=remedy))
