"""Flags of MindSpeed-LLM's convert_ckpt.py that change nothing here, and those that cannot be."""

from __future__ import annotations

import argparse

from mindspeed_rlxf.config.errors import Problem

WITHOUT_EFFECT = {
    "--model-type": "GPT is the only one",
    "--loader": "the format of the source is recognised",
    "--saver": "--save-model-type decides",
    "--max-queue-size": "there is no queue",
    "--no-checking": "what does not fit is always refused",
    "--spec": "config.json describes the layers",
    "--ckpt-cfg-path": "config.json describes the model",
    "--tokenizer-model": "the tokenizer is copied from beside config.json",
    "--vocab-file": "config.json has the size of the vocabulary",
    "--use-mcore-models": "always",
    "--megatron-path": "Megatron is not needed",
    "--load-hf-from-config": "always: weights of the original are not read",
    "--load-hf-weights": "never needed",
}
"""Accepted, with one line for all that are given."""

BARE = ("--no-checking", "--use-mcore-models", "--load-hf-from-config", "--load-hf-weights")
SEVERAL = ("--spec",)

REFUSED = {
    "--w-pack": "no family here packs query, key and value in Hugging Face",
    "--add-dense-bias": "no family here has a bias in the output projection",
    "--add-output-layer-bias": "no family here has a bias in the output layer",
    "--embed-layernorm": "no family here norms the embedding",
    "--post-norm": "no family here norms after attention or MLP",
    "--moe-grouped-gemm": "experts are written one by one; train without it",
    "--moe-tp-extend-ep": "experts are split over tensor-parallel ranks; leave it out",
    "--noop-layers": "stages of unequal depth are given by --num-layer-list",
    "--save-to-legacy": "layers are written by the names of Megatron-core only",
    "--load-from-legacy": "layers are read by the names of Megatron-core only",
    "--load-checkpoint-loosely": "a checkpoint has to fit its config.json",
    "--qlora-nf4": "quantised weights are not written; convert without it",
    "--save-lora-to-hf": "merge the adapter first",
    "--lora-load": "merge the adapter first",
    "--lora-target-modules": "merge the adapter first",
    "--lora-r": "merge the adapter first",
    "--lora-alpha": "merge the adapter first",
    "--target-data-parallel-size": "optimizer states are not converted",
}
"""Would change the result: a line with the flag and what to do."""


class _Seen(argparse.Action):
    """Collects the flag in `without_effect` or `refused`, and forgets its value."""

    def __call__(self, parser, namespace, values, option_string=None):  # type: ignore[no-untyped-def]
        flags = [*getattr(namespace, self.dest, ()), str(option_string)]
        setattr(namespace, self.dest, flags)
        if option_string == "--model-type" and values != "GPT":
            parser.error(f"--model-type={values} must be GPT; no other is converted")


def add_old_flags(parser: argparse.ArgumentParser) -> None:
    """So that scripts that use them go on working, or are told what to change."""
    parser.set_defaults(without_effect=[], refused=[])
    for flag in WITHOUT_EFFECT:
        count: int | str | None = 0 if flag in BARE else "*" if flag in SEVERAL else None
        parser.add_argument(
            flag, dest="without_effect", action=_Seen, nargs=count, help=argparse.SUPPRESS
        )
    for flag in REFUSED:
        parser.add_argument(flag, dest="refused", action=_Seen, nargs="*", help=argparse.SUPPRESS)


def refusals(flags: list[str]) -> list[Problem]:
    """One problem for each refused flag."""
    return [Problem(flag, f"is not supported: {REFUSED[flag]}") for flag in dict.fromkeys(flags)]


def notice(flags: list[str]) -> str | None:
    """One line for all flags without effect; None for none."""
    if not flags:
        return None
    parts = [f"{flag} ({WITHOUT_EFFECT[flag]})" for flag in dict.fromkeys(flags)]
    return f"note: without effect: {', '.join(parts)}"
