"""`convert`: convert weights between Hugging Face folders and Megatron layouts.

Two spellings: `convert SOURCE TARGET --to mg`, and that of MindSpeed-LLM's convert_ckpt.py.

Exit codes: 0 = written; 2 = the user's mistake, one `error:` line per problem; 75 = interrupted or
the disk is full: run the same command again, finished files are kept.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING

import yaml

from mindspeed_rlxf.cli.command_line import (
    Parser,
    fail,
    option,
    progress_bar,
    speak_utf8,
    unknown_options,
)
from mindspeed_rlxf.compat.older_flags import (
    CONVERT_FLAGS,
    add_flags,
    ignored_flags,
    refused_flags,
)
from mindspeed_rlxf.config.enums import Role
from mindspeed_rlxf.config.errors import Problem, UserError
from mindspeed_rlxf.config.schema import SAVED_AS, ArchitectureConfig
from mindspeed_rlxf.config.suggest import closest
from mindspeed_rlxf.files.plain_yaml import read_yaml
from mindspeed_rlxf.weights.formats import Format, find_weights

if TYPE_CHECKING:
    from mindspeed_rlxf.weights.convert import Conversion
    from mindspeed_rlxf.weights.layout import MegatronLayout

FAMILIES = {
    "llama2": ("llama", "qwen2"),
    "qwen3": ("qwen3",),
    "qwen3-moe": ("qwen3_moe",),
    "mixtral": ("mixtral",),
}
"""--model-type-hf -> model_type of config.json; the old tool calls Qwen2.5 llama2 too."""

MG2HF = "mg2hf"
LINES = 20  # of progress where the error stream is no terminal
GB = 1e9

OPTIONS = (
    option("source", nargs="?", help="folder to read; or --load-dir"),
    option("target", nargs="?", help="folder to write; or --save-dir"),
    option("--load-dir", help="as SOURCE"),
    option(
        "--save-dir", help="as TARGET; to hf without --hf-config: the ORIGINAL Hugging Face folder"
    ),
    option("--load-model-type", choices=["hf", "mg", "optim"], help="recognised if not given"),
    option("--to", "--save-model-type", dest="to", choices=["hf", "mg", "megatron"], required=True),
    option("--format", "--ckpt-format", dest="format", choices=["torch", "torch_dist", "zarr"]),
    option("--hf-config", "--load-hf-config", help="folder of config.json and tokenizer"),
    option(
        "--tp",
        "--target-tensor-parallel-size",
        dest="tp",
        type=int,
        default=1,
        help="tensor parallel ranks",
    ),
    option(
        "--pp",
        "--target-pipeline-parallel-size",
        dest="pp",
        type=int,
        default=1,
        help="pipeline parallel ranks",
    ),
    option(
        "--ep",
        "--target-expert-parallel-size",
        dest="ep",
        type=int,
        default=1,
        help="expert parallel ranks",
    ),
    option("--target-expert-model-parallel-size", dest="ep", type=int, help=argparse.SUPPRESS),
    option(
        "--num-layers-per-virtual-pipeline-stage", type=int, help="layers of each chunk of a rank"
    ),
    option("--num-layer-list", help="layers of each pipeline rank, such as 8,8,7,9"),
    option(
        "--make-vocab-size-divisible-by", type=int, default=1, help="rows per rank, multiple (1)"
    ),
    option("--true-vocab-size", type=int, help="must be that of config.json"),
    option("--orm", action="store_true", help="a reward model: score head instead of output layer"),
    option("--params-dtype", choices=["fp32", "fp16", "bf16"], help="of all tensors (as they are)"),
    option("--model-type-hf", help=f"must agree with config.json: {', '.join(FAMILIES)}"),
    option("--add-qkv-bias", action="store_true", help="must agree with config.json"),
    option("--shard-size-gb", type=float, default=4.0, help="of a Hugging Face file, at most (4)"),
    option("--force", action="store_true", help="replace the target"),
)


def main(argv: Sequence[str] | None = None) -> int:
    """Convert, print where the result is, and return the exit code."""
    speak_utf8()
    os.environ.setdefault("TORCH_DEVICE_BACKEND_AUTOLOAD", "0")  # no accelerator is used
    try:
        conversion = plan(_parse(argv))
        from mindspeed_rlxf.weights.convert import DiskFull, convert

        try:
            with _progress() as progress:
                reused = convert(conversion, progress)
        except DiskFull as error:
            return fail([Problem("", str(error))], 75)
    except UserError as error:
        return fail(error.problems)
    except KeyboardInterrupt:
        return fail(
            [
                Problem(
                    "", "interrupted", remedy="run the same command again, finished files are kept"
                )
            ],
            75,
        )
    if reused:
        print(f"kept {reused / GB:.2f} GB that an earlier run wrote, after verifying them")
    bias = getattr(conversion.weights, "dropped_bias", None)
    if bias:
        print(f"note: the bias {bias:g} of the reward head is dropped: scores shift by that much")
    if conversion.shares_groups:
        print("note: ranks share query groups; megatron-core 0.16 or newer can load this")
    print(f"written: {conversion.target}")
    return 0


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Parse the command line. Raises UserError for unknown options and refused older flags."""
    parser = Parser(
        OPTIONS,
        prog="convert",
        description="Weights between Hugging Face folders and Megatron layouts.",
        allow_abbrev=False,
    )
    add_flags(parser, CONVERT_FLAGS)
    arguments, unknown = parser.parse_known_args(argv)
    _raise_any([*refused_flags(arguments, CONVERT_FLAGS), *unknown_options(parser, unknown)])
    return arguments


def _raise_any(problems: list[Problem]) -> None:
    if problems:
        raise UserError(problems)


def plan(arguments: argparse.Namespace) -> Conversion:
    """Check the arguments, open the source and return the conversion; notes flags without effect.

    Errors: UserError with the problems found.
    """
    from mindspeed_rlxf.weights.convert import (
        DTYPE_NAMES,
        Conversion,
        choose_head,
        open_source,
        read_architecture,
    )

    source, target, config = _folders(arguments)
    to = Format.HF if arguments.to == "hf" else Format(arguments.format or "torch")
    architecture, hf_config = read_architecture(config)
    _check_model(arguments, architecture, str(hf_config.get("model_type")))
    head = choose_head(hf_config, arguments.orm)
    layout = None if to is Format.HF else _layout(arguments, architecture)
    if ignored := [f"{name} ({why})" for name, why in ignored_flags(arguments, CONVERT_FLAGS)]:
        print(f"note: flags without effect: {', '.join(ignored)}", file=sys.stderr)
    return Conversion(
        source=source,
        config=config,
        target=target,
        to=to,
        architecture=architecture,
        head=head,
        weights=open_source(source, architecture, head),
        layout=layout,
        dtype=DTYPE_NAMES.get(arguments.params_dtype),
        shard_size=int(arguments.shard_size_gb * GB),
        replace=arguments.force,
    )


def _folders(arguments: argparse.Namespace) -> tuple[Path, Path, Path]:
    """Return the source, the target, and the folder of config.json. Errors: UserError."""
    problems = _choice_problems(arguments)
    for role, flag in (("source", "load_dir"), ("target", "save_dir")):
        if (getattr(arguments, role) is None) == (getattr(arguments, flag) is None):
            problems.append(
                Problem(
                    role.upper(),
                    f"or --{flag.replace('_', '-')} must be given, once",
                    remedy="add or remove one",
                )
            )
    _raise_any(problems)
    source = Path(arguments.source or arguments.load_dir)
    target = Path(arguments.target or arguments.save_dir)
    if not source.is_dir():
        raise UserError(
            Problem(f"{source}", "must be a folder", remedy="give the folder of the weights")
        )
    try:
        kind, place = find_weights(source)
    except ValueError as error:
        raise UserError(Problem("", str(error))) from None
    is_hf = kind is Format.HF
    _check_source(arguments, source, place, is_hf)
    config = Path(arguments.hf_config) if arguments.hf_config else source
    if arguments.to == "hf" and arguments.save_dir and not arguments.hf_config:
        # As in the old tool, --save-dir is the original, and the result lies in a folder of it.
        if (target / "config.json").exists():
            config, target = target, target / MG2HF
        elif not (source / "config.json").exists():
            raise UserError(
                Problem(
                    "--save-dir",
                    "must be the original Hugging Face folder, with config.json",
                    target,
                    "give that, or --hf-config",
                )
            )
    if config == source and not is_hf and not (source / "config.json").exists():
        raise UserError(
            Problem(
                f"{source}",
                "must have a config.json that describes the model",
                remedy=f"give {_original_of(source)}",
            )
        )
    here, there = source.resolve(), target.resolve()
    if here == there or there in here.parents:
        raise UserError(
            Problem(
                f"{target}",
                f"must not be the source {source} or hold it",
                remedy="give another folder",
            )
        )
    return source, target, config


def _check_source(arguments: argparse.Namespace, source: Path, place: Path, is_hf: bool) -> None:
    """Check that the source is a folder of weights of the given kind. Errors: UserError.

    place: where in the source the weights lie
    """
    from mindspeed_rlxf.run.store import MANIFEST

    roles = [name for name in SAVED_AS.values() if (place / name).is_dir()]
    if roles and (place / MANIFEST).is_file():
        raise UserError(
            Problem(
                f"{place}",
                f"is a checkpoint of a run, which holds {' and '.join(roles)}",
                remedy=f"give {' or '.join(str(place / role) for role in roles)}",
            )
        )
    wanted = arguments.load_model_type
    if wanted is not None and (wanted == "hf") != is_hf:
        raise UserError(
            Problem(
                "--load-model-type",
                f"must be that of {source}, a {'Hugging Face' if is_hf else 'Megatron'} folder",
                wanted,
                "correct one of them",
            )
        )
    if is_hf and arguments.to == "hf":
        raise UserError(
            Problem(f"{source}", "is a Hugging Face folder already", remedy="use --to mg")
        )


def _original_of(source: Path) -> str:
    """Name the flags that describe a folder of Megatron weights without config.json.

    A checkpoint of a run names the folders that the run has loaded.
    """
    from mindspeed_rlxf.run.driver_state import CONFIG, TRAINER
    from mindspeed_rlxf.weights.folders import find_description

    folder = source.resolve()
    section = next((role.value for role, name in SAVED_AS.items() if name == folder.name), "")
    try:
        tree = read_yaml(folder.parent / TRAINER / CONFIG)
        load = find_description(tree[section]["load"], tree["training"]["tokenizer_name_or_path"])
    except (OSError, ValueError, yaml.YAMLError, KeyError, TypeError):
        return "the original Hugging Face folder as --hf-config"
    orm = " --orm" if section == Role.CRITIC.value else ""
    return f"what describes it in its run: --hf-config {load}{orm}"


def _choice_problems(arguments: argparse.Namespace) -> list[Problem]:
    """List flags whose values exclude each other or are not supported."""
    size, ranks = arguments.shard_size_gb, vars(arguments)
    given = [f"--{name}={ranks[name]}" for name in ("tp", "pp", "ep") if ranks[name] != 1]
    given += ["--num-layer-list"] if arguments.num_layer_list else []
    optim = "optimizer states are not converted"
    no_ranks = "a Hugging Face folder has no ranks"
    checks = [
        (
            arguments.load_model_type == "optim",
            Problem("--load-model-type", optim, "optim", "use hf or mg", colon=True),
        ),
        (
            arguments.format == "zarr",
            Problem("--ckpt-format", "cannot be written", "zarr", "use torch or torch_dist"),
        ),
        (size <= 0, Problem("--shard-size-gb", "must be more than 0", f"{size:g}", "use 4")),
        (
            arguments.to == "hf" and bool(given),
            Problem(", ".join(given), no_ranks, remedy="remove it", colon=True),
        ),
    ]
    return [problem for broken, problem in checks if broken]


def _check_model(
    arguments: argparse.Namespace, architecture: ArchitectureConfig, model_type: str
) -> None:
    """Raise UserError where flags about the model differ from its config.json."""
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
    _raise_any([problem for broken, problem in checks if broken])


def _layout(arguments: argparse.Namespace, architecture: ArchitectureConfig) -> MegatronLayout:
    """Make the Megatron layout of the flags. Raises UserError."""
    from mindspeed_rlxf.weights.layout import make_layout

    layer_list = None
    if arguments.num_layer_list is not None:
        try:
            layer_list = [int(number) for number in arguments.num_layer_list.split(",")]
        except ValueError:
            given = arguments.num_layer_list
            raise UserError(
                Problem(
                    "--num-layer-list",
                    "must be numbers with commas between",
                    given,
                    "write it like 8,8,7,9",
                )
            ) from None
    return make_layout(
        architecture,
        arguments.tp,
        arguments.pp,
        arguments.ep,
        arguments.num_layers_per_virtual_pipeline_stage,
        layer_list,
        arguments.make_vocab_size_divisible_by,
    )


def _progress() -> AbstractContextManager[Callable[..., None]]:
    """Show bytes written: a bar on a terminal, elsewhere a line for each twentieth."""
    started, shown = time.monotonic(), 0

    def print_line(done: int, total: int) -> None:
        nonlocal shown
        if done * LINES >= (shown + 1) * total:
            shown = done * LINES // max(1, total)
            seconds = time.monotonic() - started
            print(f"{done / GB:.2f} of {total / GB:.2f} GB in {seconds:.1f} s", file=sys.stderr)

    return progress_bar(print_line, unit="B")
