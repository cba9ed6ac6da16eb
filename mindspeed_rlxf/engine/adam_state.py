"""Find and create each parameter's optimizer states, in any Megatron optimizer.

With the distributed optimizer a data-parallel rank has a flat slice of some parameters' states.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.optimizer.optimizer import MegatronOptimizer
from torch import Tensor

MAIN = "fp32_param"
MOMENTS = ("exp_avg", "exp_avg_sq")


@dataclass(frozen=True)
class AdamState:
    """A parameter's optimizer states on this rank.

    Attributes:
        tensors: The optimizer's own: moments, and `fp32_param` unless the parameter itself is fp32.
        start: This rank's slice offset in the flattened parameter; no other replica has the slice.
            None if every replica has the whole parameter's states.
    """

    parameter: Tensor
    tensors: dict[str, Tensor]
    start: int | None

    @property
    def flat(self) -> range:
        """Element range in the flattened parameter covered by the tensors."""
        start = self.start or 0
        return range(start, start + next(iter(self.tensors.values())).numel())


def single_optimizers(optimizer: MegatronOptimizer) -> list[Any]:
    """Return the optimizers chained by `optimizer`, or itself: experts have their own."""
    return list(getattr(optimizer, "chained_optimizers", [optimizer]))


def adam_states(optimizer: MegatronOptimizer) -> Iterator[AdamState]:
    """Yield this rank's states by parameter: moments, and main weights beside bf16 ones.

    Skips parameters without a distributed-optimizer slice on this rank. The tensors are the
    optimizer's own, detached; missing moments are new zeros.
    """
    for single in single_optimizers(optimizer):
        for parameter, main, start in _held_mains(single):
            state = single.optimizer.state.get(main, {})
            tensors: dict[str, Tensor] = {}
            for name in MOMENTS:
                tensors[name] = state[name] if name in state else torch.zeros_like(main)
            if parameter.dtype is not torch.float32:
                tensors[MAIN] = main
            detached = {name: tensor.detach() for name, tensor in tensors.items()}
            yield AdamState(parameter, detached, start)


def init_adam_states(optimizer: MegatronOptimizer, step: int) -> None:
    """Add missing zero moments to main parameters; set the step count to `step`."""
    for single in single_optimizers(optimizer):
        adam = single.optimizer
        for _, main, _ in _held_mains(single):
            state = adam.state[main]
            for name in MOMENTS:
                if name not in state:
                    state[name] = torch.zeros_like(main.data)
        if isinstance(adam, (torch.optim.Adam, torch.optim.AdamW)):
            for state in adam.state.values():
                state["step"] = torch.tensor(float(step), dtype=torch.float32)
        else:
            for group in adam.param_groups:
                group["step"] = step


def count_steps(optimizer: MegatronOptimizer) -> int:
    """Return the optimizer step count, for Adam's bias correction; 0 before the first step.

    Raises AssertionError if it differs between parameters.
    """
    steps = set()
    for single in single_optimizers(optimizer):
        adam = single.optimizer
        for entry in (*adam.state.values(), *adam.param_groups):
            if "step" in entry:
                steps.add(int(entry["step"]))
    assert len(steps) <= 1, f"parameters have taken different numbers of steps: {sorted(steps)}"
    return steps.pop() if steps else 0


def _held_mains(optimizer: Any) -> Iterator[tuple[Tensor, Tensor, int | None]]:
    """Yield each parameter, the tensor this rank's optimizer updates for it, and an offset.

    The offset is the tensor's start in the flattened parameter; None for a whole tensor. Skips
    parameters without a distributed-optimizer slice on this rank.
    """
    if not isinstance(optimizer, DistributedOptimizer):
        groups: list[Any] = [(g["params"], g["params"]) for g in optimizer.optimizer.param_groups]
        if optimizer.config.bf16:  # the optimizer updates fp32 copies
            groups = list(
                zip(optimizer.float16_groups, optimizer.fp32_from_float16_groups, strict=True)
            )
            groups += [(group, group) for group in optimizer.fp32_from_fp32_groups]
        for parameters, mains in groups:
            for parameter, main in zip(parameters, mains, strict=True):
                yield parameter, main, None
        return
    for by_dtype in optimizer.gbuf_ranges:
        for buckets in by_dtype.values():
            for bucket in buckets:
                for parameter, ranges in bucket["param_map"].items():
                    group, order = optimizer.model_param_group_index_map[parameter]
                    main = optimizer.optimizer.param_groups[group]["params"][order]
                    yield parameter, main, ranges["param"].start
