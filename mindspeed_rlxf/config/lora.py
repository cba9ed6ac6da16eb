"""Low-rank adapters (LoRA, arXiv:2106.09685): their keys, and which modules they select.

Names and meanings are PEFT's.
"""

import re
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, TypeAlias

from mindspeed_rlxf.config.architecture import ArchitectureConfig
from mindspeed_rlxf.config.fields import Section, Strings, free, key
from mindspeed_rlxf.config.problems import Problem

ALL_LINEAR = "all-linear"
ATTENTION = tuple(f"self_attn.{name}_proj" for name in "qkvo")
MLP = tuple(f"mlp.{name}_proj" for name in ("gate", "up", "down"))
LORA_RANKS = 1, 8, 16, 32, 64, 128, 256, 320, 512
"""Largest ranks that a vLLM server can be started for."""

Names: TypeAlias = str | Strings
"""A regular expression for a module's whole name, or a list of names and endings of names."""


class LoraConfig(Section):
    """Low-rank adapters, trained in place of the weights, which stay as they were loaded."""

    rank: int = key(0, "rank of the adapters; 0 = all weights are trained", ge=0)
    alpha: float = key(16.0, "adapters are scaled by alpha / rank", gt=0, used_if="rank>0")
    dropout: float = free(0.0, "0; there is no dropout")
    target_modules: Names = key(
        ALL_LINEAR,
        "modules to adapt: all-linear, a list of names or suffixes, or a regular expression",
        used_if="rank>0",
    )
    exclude_modules: Names = key(
        (),
        "modules to exclude: a list of names or suffixes, or a regular expression",
        used_if="rank>0",
    )

    def _broken_rules(self) -> Iterator[Problem]:
        # It would make the ratio of new to old probabilities noisy, and each tensor-parallel rank
        # would drop other inputs of an A that all of them have.
        if self.dropout != 0:
            yield Problem("dropout", "must be 0: there is no dropout", self.dropout, "remove it")

    @property
    def scale(self) -> float:
        """Factor of the adapters' outputs."""
        return self.alpha / self.rank

    def selects(self, module: str) -> bool:
        """Return whether a linear module gets an adapter, by its full Hugging Face name."""
        if self.rank == 0 or _matches(self.exclude_modules, module):
            return False
        return self.target_modules == ALL_LINEAR or _matches(self.target_modules, module)

    def selects_nothing(self, modules: Iterable[str], model: str) -> Problem:
        """Return the problem that none of a model's linear modules gets an adapter."""
        suffixes = ", ".join(dict.fromkeys(name.rpartition(".")[2] for name in modules))
        rule = f"and exclude_modules must leave some of {model}'s modules {suffixes}"
        targets: Any = self.target_modules
        if not isinstance(targets, str):
            targets = list(targets)
        return Problem("lora.target_modules", rule, targets, "use all-linear")


def _matches(names: str | Sequence[str], module: str) -> bool:
    if isinstance(names, str):
        return re.fullmatch(names, module) is not None
    return any(module == name or module.endswith(f".{name}") for name in names)


ROUTERS = ("gate", "router", "shared_expert_gate")


def can_adapt(module: str) -> bool:
    """Return whether a linear of a layer can have an adapter: routers and experts cannot."""
    return ".experts." not in module and module.rpartition(".")[2] not in ROUTERS


def linear_modules(architecture: ArchitectureConfig) -> Iterator[str]:
    """Yield the names of the modules that can have adapters: attention and dense MLPs."""
    names = ATTENTION + (MLP if architecture.num_experts is None else ())
    for layer in range(architecture.num_layers):
        yield from (f"model.layers.{layer}.{name}" for name in names)
