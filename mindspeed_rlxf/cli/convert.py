"""`convert`: convert weights between Hugging Face folders and Megatron layouts.

Two spellings: `convert SOURCE TARGET --to mg`, and MindSpeed-LLM's convert_ckpt.py.

Exit codes: 0 = written; 2 = user mistake, one `error:` line per problem; 75 = interrupted or disk
full: run the same command again.
"""

import argparse
import errno
import os
import sys
from collections.abc import Sequence

from mindspeed_rlxf.cli.command_line import (
    Parser,
    command,
    fail,
    option,
    program_name,
    progress_bar,
    unknown_options,
)
from mindspeed_rlxf.compat.mindspeed_llm.flags import CONVERT_FLAGS, add_flags, check_flags
from mindspeed_rlxf.config.problems import Problem, UserError
from mindspeed_rlxf.weights.formats import FAMILIES

OPTIONS = (
    option("source", nargs="?", help="folder to read; or --load-dir"),
    option("target", nargs="?", help="folder to write; or --save-dir"),
    option("--load-dir", help="as SOURCE"),
    option(
        "--save-dir", help="as TARGET; to hf without --hf-config: the ORIGINAL Hugging Face folder"
    ),
    option("--load-model-type", choices=["hf", "mg"], help="recognised if absent"),
    option("--to", "--save-model-type", dest="to", choices=["hf", "mg", "megatron"], required=True),
    option("--format", "--ckpt-format", dest="format", choices=["torch", "torch_dist"]),
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
    option("--params-dtype", choices=["fp32", "fp16", "bf16"], help="of all tensors (as stored)"),
    option("--model-type-hf", help=f"must agree with config.json: {', '.join(FAMILIES)}"),
    option("--add-qkv-bias", action="store_true", help="must agree with config.json"),
    option("--shard-size-gb", type=float, default=4.0, help="largest Hugging Face file (4)"),
    option("--force", action="store_true", help="replace the target"),
    option("--trust-files", action="store_true", help="read pickled files with torch before 2.10"),
)


@command
def main(argv: Sequence[str] | None = None) -> int:
    """Convert the weights; print notes, progress and the target; return the exit code.

    Sets TORCH_DEVICE_BACKEND_AUTOLOAD=0 in this process if unset.
    """
    os.environ.setdefault("TORCH_DEVICE_BACKEND_AUTOLOAD", "0")  # no accelerator is used
    from mindspeed_rlxf.weights.chunks import RM_HEAD_BIAS, whole
    from mindspeed_rlxf.weights.conversion import plan_conversion
    from mindspeed_rlxf.weights.tensor_conversion import convert

    parser = Parser(
        OPTIONS,
        prog=program_name("convert"),
        description="Weights between Hugging Face folders and Megatron layouts.",
        allow_abbrev=False,
    )
    add_flags(parser, CONVERT_FLAGS)
    try:
        arguments, unknown = parser.parse_known_args(argv)
        problems, ignored = check_flags(arguments, CONVERT_FLAGS)
        problems += unknown_options(parser, unknown)
        if problems:
            return fail(problems)
        conversion = plan_conversion(arguments)
        if ignored:
            flags = ", ".join(f"{name} ({reason})" for name, reason in ignored.items())
            print(f"note: flags without effect: {flags}", file=sys.stderr)
        with progress_bar("B") as progress:
            convert(conversion, progress)
    except KeyboardInterrupt:
        return fail([Problem("", "interrupted", remedy="run the same command again")], 75)
    except UserError:
        raise
    except ValueError as error:
        return fail([Problem("", str(error))])
    except OSError as error:
        is_disk_full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        file = str(error.filename or conversion.target)
        rule = f"cannot be read or written ({error.strerror})"
        remedy = "free some space" if is_disk_full else "correct that"
        remedy += " and run the same command again"
        return fail([Problem(file, rule, remedy=remedy)], 75 if is_disk_full else 2)
    if RM_HEAD_BIAS in conversion.weights:
        bias = float(conversion.weights[RM_HEAD_BIAS].read(whole((1,))))
        if bias:
            print(f"note: the bias {bias:g} of the reward head is dropped: scores shift by that")
    if conversion.shares_groups:
        print("note: ranks share query groups; megatron-core 0.16 or newer can load this")
    print(f"written: {conversion.target}")
    return 0
