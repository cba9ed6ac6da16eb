"""The flags of MindSpeed-LLM's scripts: without effect here, or refused."""

import argparse
import functools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from mindspeed_rlxf.config.problems import Problem


@dataclass(frozen=True)
class OlderFlag:
    """An older toolkit's flag, without effect here or refused.

    Attributes:
        meaning: Why it has no effect, or the fix if it is refused.
        nargs: As in argparse; 0 = the flag has no value.
        allowed: Values accepted without effect; None = all, () = the flag is refused.
    """

    meaning: str
    nargs: int | str | None = None
    allowed: tuple[str, ...] | None = ()


_ignored = functools.partial(OlderFlag, allowed=None)

CONVERT_FLAGS: Mapping[str, OlderFlag] = {
    "--model-type": OlderFlag("GPT is the only one", None, ("GPT",)),
    "--loader": _ignored("the format of the source is recognised"),
    "--saver": _ignored("--save-model-type decides"),
    "--max-queue-size": _ignored("there is no queue"),
    "--no-checking": _ignored("what does not fit is always refused", 0),
    "--spec": _ignored("config.json describes the layers", "*"),
    "--ckpt-cfg-path": _ignored("config.json describes the model"),
    "--tokenizer-model": _ignored("the tokenizer is copied from beside config.json"),
    "--vocab-file": _ignored("config.json has the size of the vocabulary"),
    "--use-mcore-models": _ignored("always", 0),
    "--megatron-path": _ignored("Megatron is not needed"),
    "--load-hf-from-config": _ignored("always: weights of the original are not read", 0),
    "--load-hf-weights": _ignored("never needed", 0),
    "--w-pack": OlderFlag("no family here packs query, key and value in Hugging Face", "*"),
    "--add-dense-bias": OlderFlag("no family here has a bias in the output projection", "*"),
    "--add-output-layer-bias": OlderFlag("no family here has a bias in the output layer", "*"),
    "--embed-layernorm": OlderFlag("no family here norms the embedding", "*"),
    "--post-norm": OlderFlag("no family here norms after attention or MLP", "*"),
    "--moe-grouped-gemm": OlderFlag("experts are written one by one; train without it", "*"),
    "--moe-tp-extend-ep": OlderFlag(
        "experts are split over tensor-parallel ranks; leave it out", "*"
    ),
    "--noop-layers": OlderFlag("stages of unequal depth are given by --num-layer-list", "*"),
    "--save-to-legacy": OlderFlag("layers are written by the names of Megatron-core only", "*"),
    "--load-from-legacy": OlderFlag("layers are read by the names of Megatron-core only", "*"),
    "--load-checkpoint-loosely": OlderFlag("a checkpoint has to fit its config.json", "*"),
    "--qlora-nf4": OlderFlag("quantised weights are not written; convert without it", "*"),
    **dict.fromkeys(
        ("--save-lora-to-hf", "--lora-load", "--lora-target-modules", "--lora-r", "--lora-alpha"),
        OlderFlag("merge the adapter first", "*"),
    ),
    "--target-data-parallel-size": OlderFlag("optimizer states are not converted", "*"),
}
"""Flags in MindSpeed-LLM's convert_ckpt.py."""

_MIX = "give data.data_path several prefixes, which training shuffles"
_FILES = "name the files with --input, and their columns with --map-keys"

PREPROCESS_FLAGS: Mapping[str, OlderFlag] = {
    "--streaming": _ignored("rows are always read as a stream", 0),
    "--cache-dir": _ignored("nothing is cached"),
    "--overwrite-cache": _ignored("nothing is cached; --overwrite replaces a data set", 0),
    "--n-subs": _ignored("the rows are not split first: --workers tokenize them"),
    "--seed": _ignored("nothing is drawn at random: rows keep their order"),
    "--tokenizer-not-use-fast": _ignored("training reads the rows with the fast tokenizer too", 0),
    "--append-eod": _ignored("prompts end with the header of the response", 0),
    "--pad-to-multiple-of": _ignored("sequences are stored without padding"),
    **dict.fromkeys(
        ("--make-vocab-size-divisible-by", "--pad-vocab-size-to"),
        _ignored("the vocabulary is padded by the model"),
    ),
    "--dataset-impl": OlderFlag("data sets are memory-mapped; leave it out", None, ("mmap",)),
    "--mix-strategy": OlderFlag(f"files are read one after the other; {_MIX}", None, ("concat",)),
    "--interleave-probs": OlderFlag(_MIX),
    "--merge-group-keys": OlderFlag(_MIX, "*"),
    "--datasets": OlderFlag(_FILES, "*"),
    "--dataset-dir": OlderFlag(_FILES),
    "--hf-datasets-params": OlderFlag(f"nothing is downloaded; {_FILES}"),
    "--script-data-dir": OlderFlag(f"no script is run; {_FILES}"),
    "--prompt-type-path": OlderFlag("templates come with the package; use --prompt-type"),
    **dict.fromkeys(
        ("--pack", "--neat-pack"), OlderFlag("training packs sequences itself; leave it out", 0)
    ),
    "--json-keys": OlderFlag(
        "the handler decides which columns are written; use --dataset-additional-keys", "*"
    ),
    **dict.fromkeys(
        ("--split-sentences", "--keep-newlines"),
        OlderFlag("it is for pre-training; leave it out", 0),
    ),
    "--placeholder-token": OlderFlag("rewards of single steps are not trained here"),
    "--reward-tokens": OlderFlag("rewards of single steps are not trained here", "*"),
    **dict.fromkeys(
        ("--vocab-file", "--merge-file", "--tokenizer-model"),
        OlderFlag("give the Hugging Face folder as --tokenizer-name-or-path"),
    ),
}
"""Flags in MindSpeed-LLM's preprocess_data.py."""


def add_flags(parser: argparse.ArgumentParser, flags: Mapping[str, OlderFlag]) -> None:
    """Add the flags to a parser, hidden in its help. Each is None if not given."""
    for name, flag in flags.items():
        kind: dict[str, Any] = {"nargs": flag.nargs}
        if flag.nargs == 0:
            kind = {"action": "store_const", "const": True}
        parser.add_argument(name, help=argparse.SUPPRESS, **kind)


def check_flags(
    arguments: argparse.Namespace, flags: Mapping[str, OlderFlag]
) -> tuple[list[Problem], dict[str, str]]:
    """Return problems for refused flags, and flag -> meaning for flags without effect."""
    problems, ignored = [], {}
    for name, flag in flags.items():
        value = getattr(arguments, name[2:].replace("-", "_"))
        if value is not None and flag.allowed is not None and value not in flag.allowed:
            shown = value if isinstance(value, str) else None
            problems.append(Problem(name, f"is not supported: {flag.meaning}", shown))
        elif value is not None:
            ignored[name] = flag.meaning
    return problems, ignored
