"""`convert`: weights between Hugging Face folders and Megatron layouts.

Two spellings: `convert SOURCE TARGET --to mg`, and that of MindSpeed-LLM's convert_ckpt.py.

Exit codes: 0 = written; 2 = the user's mistake, one `error:` line per problem; 75 = interrupted or
the disk is full: run the same command again, finished files are kept.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import yaml
from tqdm import tqdm

from mindspeed_rlxf.cli.command_line import Parser, print_problems, speak_utf8, unknown_option
from mindspeed_rlxf.compat.convert_flags import add_old_flags, notice, refusals
from mindspeed_rlxf.config.enums import Role
from mindspeed_rlxf.config.errors import Problem, UserError
from mindspeed_rlxf.config.suggest import closest
from mindspeed_rlxf.files.plain_yaml import read_yaml
from mindspeed_rlxf.files.printable import RawStream

if TYPE_CHECKING:
    from mindspeed_rlxf.config.schema import ArchitectureConfig
    from mindspeed_rlxf.weights.convert import Conversion, Progress

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


def main(argv: Sequence[str] | None = None) -> int:
    """Converts, prints where the result is, and returns the exit code."""
    speak_utf8()
    os.environ.setdefault("TORCH_DEVICE_BACKEND_AUTOLOAD", "0")  # no accelerator is used
    try:
        conversion = plan(_parse(argv))
        from mindspeed_rlxf.weights.convert import DiskFull, convert

        try:
            with _progress() as progress:
                reused = convert(conversion, progress)
        except DiskFull as error:
            print_problems([Problem("", str(error))])
            return 75
    except UserError as error:
        print_problems(error.problems)
        return 2
    except KeyboardInterrupt:
        print_problems(
            [
                Problem(
                    "", "interrupted", remedy="run the same command again, finished files are kept"
                )
            ]
        )
        return 75
    if reused:
        print(f"{reused / GB:.2f} GB were there from an earlier run and are verified")
    bias = getattr(conversion.weights, "dropped_bias", None)
    if bias:
        print(f"note: the bias {bias:g} of the reward head is dropped: scores shift by that much")
    if conversion.shares_groups:
        print("note: ranks share query groups: Megatron loads this from megatron-core 0.16 on")
    print(f"written: {conversion.target}")
    return 0


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = Parser(
        prog="convert",
        description="Weights between Hugging Face folders and Megatron layouts.",
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("source", nargs="?", help="folder to read; or --load-dir")
    add("target", nargs="?", help="folder to write; or --save-dir")
    add("--load-dir", help="as SOURCE")
    add("--save-dir", help="as TARGET; to hf without --hf-config: the ORIGINAL Hugging Face folder")
    add("--load-model-type", choices=["hf", "mg", "optim"], help="recognised if not given")
    add("--to", "--save-model-type", dest="to", choices=["hf", "mg", "megatron"], required=True)
    add("--format", "--ckpt-format", dest="format", choices=["torch", "torch_dist", "zarr"])
    add("--hf-config", "--load-hf-config", help="folder of config.json and tokenizer")
    sizes = {
        "--tp": "--target-tensor-parallel-size",
        "--pp": "--target-pipeline-parallel-size",
        "--ep": "--target-expert-parallel-size",
    }
    for short, long in sizes.items():
        add(short, long, dest=short[2:], type=int, default=1, help=f"{long[9:-14]} parallel ranks")
    add("--target-expert-model-parallel-size", dest="ep", type=int, help=argparse.SUPPRESS)
    add("--num-layers-per-virtual-pipeline-stage", type=int, help="layers of each chunk of a rank")
    add("--num-layer-list", help="layers of each pipeline rank, such as 8,8,7,9")
    add("--make-vocab-size-divisible-by", type=int, default=1, help="rows per rank, multiple (1)")
    add("--true-vocab-size", type=int, help="must be that of config.json")
    add("--orm", action="store_true", help="a reward model: score head instead of output layer")
    add("--params-dtype", choices=["fp32", "fp16", "bf16"], help="of all tensors (as they are)")
    add("--model-type-hf", help=f"must agree with config.json: {', '.join(FAMILIES)}")
    add("--add-qkv-bias", action="store_true", help="must agree with config.json")
    add("--shard-size-gb", type=float, default=4.0, help="of a Hugging Face file, at most (4)")
    add("--force", action="store_true", help="replace the target")
    add_old_flags(parser)
    arguments, unknown = parser.parse_known_args(argv)
    problems = refusals(arguments.refused)
    if unknown:
        flags = [flag for action in parser._actions for flag in action.option_strings]
        problems += [unknown_option(word, flags) for word in unknown]
    if problems:
        raise UserError(problems)
    return arguments


def plan(arguments: argparse.Namespace) -> Conversion:
    """What the arguments ask for, checked. Errors: UserError with the problems found."""
    from mindspeed_rlxf.weights.convert import (
        DTYPE_NAMES,
        Conversion,
        choose_head,
        open_source,
        read_architecture,
    )
    from mindspeed_rlxf.weights.formats import Format

    source, target, config = _folders(arguments)
    to = Format.HF if arguments.to == "hf" else Format(arguments.format or "torch")
    architecture, hf_config = read_architecture(config)
    _check_model(arguments, architecture, str(hf_config.get("model_type")))
    head = choose_head(hf_config, arguments.orm)
    layout = None if to is Format.HF else _layout(arguments, architecture)
    if line := notice(arguments.without_effect):
        print(line, file=sys.stderr)
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
    """Source, target, and where config.json is."""
    from mindspeed_rlxf.weights.formats import Format, find_weights

    problems = _choice_problems(arguments)
    for role, flag in (("source", "load_dir"), ("target", "save_dir")):
        given = [v for v in (getattr(arguments, role), getattr(arguments, flag)) if v is not None]
        if len(given) != 1:
            name = f"--{flag.replace('_', '-')}"
            problems.append(
                Problem(role.upper(), f"or {name} must be given, once", remedy="add or remove one")
            )
    if problems:
        raise UserError(problems)
    source = Path(arguments.source or arguments.load_dir)
    target = Path(arguments.target or arguments.save_dir)
    if not source.is_dir():
        raise UserError(
            Problem(f"{source}", "is no folder", remedy="give the folder of the weights")
        )
    try:
        kind, place = find_weights(source)
    except ValueError as error:
        raise UserError(Problem("", str(error))) from None
    if roles := _roles_in(place):
        raise UserError(
            Problem(
                f"{place}",
                f"is a checkpoint of a run, which holds {' and '.join(roles)}",
                remedy=f"give {' or '.join(str(place / role) for role in roles)}",
            )
        )
    is_hf = kind is Format.HF
    wanted = arguments.load_model_type
    if wanted is not None and (wanted == "hf") != is_hf:
        raise UserError(
            Problem(
                "--load-model-type",
                f"is wrong, {source} is {'a Hugging Face' if is_hf else 'a Megatron'} folder",
                wanted,
                "correct one of them",
            )
        )
    if is_hf and arguments.to == "hf":
        raise UserError(
            Problem(f"{source}", "is a Hugging Face folder already", remedy="use --to mg")
        )
    config = Path(arguments.hf_config) if arguments.hf_config else source
    if arguments.to == "hf" and arguments.save_dir and not arguments.hf_config:
        # The old tool's way: --save-dir is the original, the result lies in a folder of it.
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
                "has no config.json that describes the model",
                remedy=f"give {_original_of(source)}",
            )
        )
    _check_target(source, target)
    return source, target, config


def _roles_in(folder: Path) -> list[str]:
    """The folders of weights in a checkpoint of a run; none in another folder."""
    from mindspeed_rlxf.config.schema import SAVED_AS
    from mindspeed_rlxf.run.store import MANIFEST

    is_run = (folder / MANIFEST).is_file()
    return [name for name in SAVED_AS.values() if is_run and (folder / name).is_dir()]


def _original_of(source: Path) -> str:
    """The flags that describe it: a checkpoint of a run says what the run has loaded."""
    from mindspeed_rlxf.config.schema import SAVED_AS
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
    problems, size = [], arguments.shard_size_gb
    if arguments.load_model_type == "optim":
        problems.append(
            Problem(
                "--load-model-type",
                "optimizer states are not converted",
                "optim",
                "use hf or mg",
                colon=True,
            )
        )
    if arguments.format == "zarr":
        problems.append(
            Problem("--ckpt-format", "is not written", "zarr", "use torch or torch_dist")
        )
    if size <= 0:
        problems.append(Problem("--shard-size-gb", "must be more than 0", f"{size:g}", "use 4"))
    if arguments.to == "hf":
        given = [
            f"--{name}={n}" for name in ("tp", "pp", "ep") if (n := getattr(arguments, name)) != 1
        ]
        given += ["--num-layer-list"] if arguments.num_layer_list else []
        if given:
            problems.append(
                Problem(
                    ", ".join(given),
                    "a Hugging Face folder has no ranks",
                    remedy="remove it",
                    colon=True,
                )
            )
    return problems


def _check_target(source: Path, target: Path) -> None:
    here, there = source.resolve(), target.resolve()
    if here == there or there in here.parents:
        raise UserError(
            Problem(
                f"{target}",
                f"must not be the source {source} or hold it",
                remedy="give another folder",
            )
        )


def _check_model(
    arguments: argparse.Namespace, architecture: ArchitectureConfig, model_type: str
) -> None:
    problems = []
    family = arguments.model_type_hf
    if family is not None and family not in FAMILIES:
        guess = closest(family, FAMILIES)
        problems.append(
            Problem(
                "--model-type-hf",
                "is not converted",
                family,
                f"did you mean {guess}?" if guess else f"use {', '.join(FAMILIES)}",
            )
        )
    elif family is not None and model_type not in FAMILIES[family]:
        problems.append(
            Problem(
                "--model-type-hf",
                f"must agree with config.json, whose model_type is {model_type}",
                family,
                "leave it out",
            )
        )
    if arguments.add_qkv_bias and not architecture.add_qkv_bias:
        problems.append(
            Problem(
                "--add-qkv-bias",
                f"model_type {model_type} has none",
                remedy="leave it out",
                colon=True,
            )
        )
    true_size = arguments.true_vocab_size
    if true_size is not None and true_size != architecture.vocab_size:
        problems.append(
            Problem(
                "--true-vocab-size",
                f"must be the vocab_size={architecture.vocab_size} of config.json",
                true_size,
                "leave it out",
            )
        )
    if problems:
        raise UserError(problems)


def _layout(arguments: argparse.Namespace, architecture: ArchitectureConfig):  # type: ignore[no-untyped-def]
    from mindspeed_rlxf.weights.layout import make_layout

    layer_list = None
    if arguments.num_layer_list is not None:
        try:
            layer_list = [int(number) for number in arguments.num_layer_list.split(",")]
        except ValueError:
            rule, given = "must be numbers with commas between", arguments.num_layer_list
            raise UserError(
                Problem("--num-layer-list", rule, given, "write it like 8,8,7,9")
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


@contextmanager
def _progress() -> Iterator[Progress]:
    """A bar on a terminal, elsewhere a line for each twentieth."""
    started, shown = time.monotonic(), 0

    def line(done: int, total: int) -> None:
        nonlocal shown
        if done * LINES >= (shown + 1) * total:
            shown = done * LINES // max(1, total)
            seconds = time.monotonic() - started
            print(f"{done / GB:.2f} of {total / GB:.2f} GB in {seconds:.1f} s", file=sys.stderr)

    if not sys.stderr.isatty():
        yield line
        return
    with tqdm(unit="B", unit_scale=True, file=RawStream(sys.stderr)) as bar:

        def move(done: int, total: int) -> None:
            bar.total = total
            bar.update(done - bar.n)

        yield move
