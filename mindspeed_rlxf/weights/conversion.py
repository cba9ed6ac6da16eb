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
        given, layer_list = arguments.num_layer_list, None
        if given is not None:
            try:
                layer_list = [int(number) for number in given.split(",")]
            except ValueError:
                rule, remedy = "must be numbers with commas between", "write it like 8,8,7,9"
                raise UserError(Problem("--num-layer-list", rule, given, remedy)) from None
        layout = make_layout(
            architecture,
            arguments.tp,
            arguments.pp,
            arguments.ep,
            arguments.num_layers_per_virtual_pipeline_stage,
            layer_list,
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


def _check_folders(arguments: argparse.Namespace) -> tuple[Path, Path, Path]:
    """Check flags and folders; return source, target, and the config.json folder."""
    size, ranks = arguments.shard_size_gb, vars(arguments)
    given = [f"--{name}={ranks[name]}" for name in ("tp", "pp", "ep") if ranks[name] != 1]
    given += ["--num-layer-list"] if arguments.num_layer_list else []
    no_ranks = "a Hugging Face folder has no ranks"
    checks = [
        (
            not 0 < size < math.inf,
            Problem("--shard-size-gb", "must be more than 0, and finite", f"{size:g}", "use 4"),
        ),
        (
            arguments.to == "hf" and bool(given),
            Problem(", ".join(given), no_ranks, remedy="remove it", colon=True),
        ),
    ]
    problems = [problem for broken, problem in checks if broken]
    for role, flag in (("source", "load_dir"), ("target", "save_dir")):
        if (getattr(arguments, role) is None) == (getattr(arguments, flag) is None):
            rule = f"or --{flag.replace('_', '-')} must be given, once"
            problems.append(Problem(role.upper(), rule, remedy="add or remove one"))
    if problems:
        raise UserError(problems)
    source = Path(arguments.source or arguments.load_dir)
    is_hf = _check_source(arguments, source)
    config, target = _find_config_and_target(arguments, source, is_hf)
    here, there = source.resolve(), target.resolve()
    if here == there or there in here.parents:
        raise _error(target, f"must not be the source {source} or hold it", "give another folder")
    return source, target, config


def _check_source(arguments: argparse.Namespace, source: Path) -> bool:
    """Check the source; return whether it is a Hugging Face folder, or has no weights."""
    if not source.is_dir():
        raise _error(source, "must be a folder", "give the folder of the weights")
    kind, place = find_weights(source)
    is_hf = kind is Format.HF
    roles = [name for name in SAVED_AS.values() if (place / name).is_dir()]
    if roles and (place / "manifest.json").is_file():
        remedy = f"give {' or '.join(str(place / role) for role in roles)}"
        raise _error(place, f"is a checkpoint of a run, which holds {' and '.join(roles)}", remedy)
    wanted = arguments.load_model_type
    if wanted is not None and (wanted == "hf") != is_hf:
        rule = f"must be that of {source}, a {'Hugging Face' if is_hf else 'Megatron'} folder"
        raise UserError(Problem("--load-model-type", rule, wanted, "correct one of them"))
    is_safe = (place / SINGLE).exists() or (place / INDEX).exists()
    if is_hf and is_safe and arguments.to == "hf":
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
    described = (source / "config.json").exists()
    if arguments.to == "hf" and arguments.save_dir and not arguments.hf_config:
        if (target / "config.json").exists():
            return target, target / "mg2hf"
        if not described:
            rule = "must be the original Hugging Face folder, with config.json"
            raise UserError(Problem("--save-dir", rule, target, "give that, or --hf-config"))
    if config == source and not is_hf and not described:
        remedy = "give the original Hugging Face folder as --hf-config"
        raise _error(source, "must have a config.json that describes the model", remedy)
    return config, target


def _check_model(
    arguments: argparse.Namespace, architecture: ArchitectureConfig, model_type: str
) -> None:
    """Raise UserError for model flags that are unknown or contradict config.json."""
    family, true_size = arguments.model_type_hf, arguments.true_vocab_size
    guess = closest(family or "", FAMILIES)
    families = f"did you mean {guess}?" if guess else f"use {', '.join(FAMILIES)}"
    agree = f"must agree with config.json, whose model_type is {model_type}"
    rows = f"must be the vocab_size={architecture.vocab_size} of config.json"
    no_bias, leave_out = f"model_type {model_type} has none", "leave it out"
    checks = [
        (
            family not in (None, *FAMILIES),
            Problem("--model-type-hf", "cannot be converted", family, families),
        ),
        (
            family in FAMILIES and model_type not in FAMILIES[family],
            Problem("--model-type-hf", agree, family, leave_out),
        ),
        (
            arguments.add_qkv_bias and not architecture.add_qkv_bias,
            Problem("--add-qkv-bias", no_bias, remedy=leave_out, colon=True),
        ),
        (
            true_size not in (None, architecture.vocab_size),
            Problem("--true-vocab-size", rows, true_size, leave_out),
        ),
    ]
    if problems := [problem for broken, problem in checks if broken]:
        raise UserError(problems)


def _error(path: Path, rule: str, remedy: str) -> UserError:
    return UserError(Problem(f"{path}", rule, remedy=remedy))
