"""Flags of the older toolkit that `preprocess` knows and does not need, and those it refuses."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from mindspeed_rlxf.config.errors import Problem


@dataclass(frozen=True)
class Flag:
    """meaning:  what holds here in its place: a printed line, or the remedy of a refusal
    refused:  whether a value is an error
    takes:    "" = no value, "1" = one, "+" = any number
    """

    meaning: str
    refused: Callable[[Any], bool]
    takes: str = ""


def _always(value: Any) -> bool:
    return True


def _never(value: Any) -> bool:
    return False


def _mixes(value: Any) -> bool:
    return str(value) != "concat"


def _not_mmap(value: Any) -> bool:
    return str(value) != "mmap"


_MIX = "give the sets to data.data_path, which takes several prefixes; training shuffles them"
_REGISTRY = "name the files with --input; their columns are told with --map-keys"
_PRETRAIN = "it is for pre-training, which is not preprocessed here; leave it out"
_STEPS = "rewards of single steps are not trained here; leave it out"
_FOLDER = "give the Hugging Face folder as --tokenizer-name-or-path"
_PACK = "sequences are packed while they are trained on, without padding; leave it out"
_NO_CACHE = "nothing is cached: rows are read from their files"

OLDER_FLAGS: Mapping[str, Flag] = {
    "--streaming": Flag("rows are always read as a stream", _never),
    "--cache-dir": Flag(_NO_CACHE, _never, "1"),
    "--overwrite-cache": Flag(f"{_NO_CACHE}; --overwrite replaces a data set", _never),
    "--n-subs": Flag("the rows are not split first: --workers tokenize them", _never, "1"),
    "--seed": Flag("nothing is drawn at random: rows keep their order", _never, "1"),
    "--pad-to-multiple-of": Flag("sequences are stored without padding", _never, "1"),
    "--make-vocab-size-divisible-by": Flag("the vocabulary is padded by the model", _never, "1"),
    "--pad-vocab-size-to": Flag("the vocabulary is padded by the model", _never, "1"),
    "--dataset-impl": Flag("data sets are memory-mapped; leave it out", _not_mmap, "1"),
    "--mix-strategy": Flag(f"files are read one after the other; {_MIX}", _mixes, "1"),
    "--interleave-probs": Flag(_MIX, _always, "1"),
    "--datasets": Flag(_REGISTRY, _always, "+"),
    "--dataset-dir": Flag(_REGISTRY, _always, "1"),
    "--hf-datasets-params": Flag(f"nothing is downloaded; {_REGISTRY}", _always, "1"),
    "--script-data-dir": Flag(f"no script is run; {_REGISTRY}", _always, "1"),
    "--prompt-type-path": Flag("templates come with the package; use --prompt-type", _always, "1"),
    "--pack": Flag(_PACK, _always),
    "--neat-pack": Flag(_PACK, _always),
    "--json-keys": Flag(
        "the handler says which columns are written; use --dataset-additional-keys", _always, "+"
    ),
    "--split-sentences": Flag(_PRETRAIN, _always),
    "--keep-newlines": Flag(_PRETRAIN, _always),
    "--placeholder-token": Flag(_STEPS, _always, "1"),
    "--reward-tokens": Flag(_STEPS, _always, "+"),
    "--vocab-file": Flag(_FOLDER, _always, "1"),
    "--merge-file": Flag(_FOLDER, _always, "1"),
    "--tokenizer-model": Flag(_FOLDER, _always, "1"),
}


def add_older_flags(parser: argparse.ArgumentParser) -> None:
    arities: dict[str, dict[str, Any]] = {
        "": {"action": "store_const", "const": True},
        "1": {},
        "+": {"nargs": "*"},
    }
    for name, flag in OLDER_FLAGS.items():
        arity = arities[flag.takes]
        parser.add_argument(name, help=argparse.SUPPRESS, default=None, **arity)


def notes(arguments: argparse.Namespace) -> Iterator[str]:
    """One line for each flag that is accepted and has nothing to do."""
    for name, flag, value in _given(arguments):
        if not flag.refused(value):
            yield f"{name} has no effect: {flag.meaning}"


def refusals(arguments: argparse.Namespace) -> Iterator[Problem]:
    for name, flag, value in _given(arguments):
        if flag.refused(value):
            shown = None if value is True or isinstance(value, list) else value
            yield Problem(name, f"is not supported: {flag.meaning}", shown)


def _given(arguments: argparse.Namespace) -> Iterator[tuple[str, Flag, Any]]:
    for name, flag in OLDER_FLAGS.items():
        value = getattr(arguments, name[2:].replace("-", "_"))
        if value is not None:
            yield name, flag, value
