"""Adam's tensors of a parameter, whole and by name, whichever of Megatron's optimizers holds them.

Under the distributed optimizer a data-parallel rank holds a flat slice of each parameter's slots;
they are put together one parameter at a time, so that no device holds all of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.optimizer.optimizer import MegatronOptimizer
from torch import Tensor

MAIN = "fp32_param"
MOMENTS = ("exp_avg", "exp_avg_sq")
Slots = dict[str, Tensor]
"""Slot name -> tensor in the shape of the parameter on this rank."""


def chained(optimizer: MegatronOptimizer) -> list[Any]:
    """Megatron's optimizers of a model: one, or with experts one more for these."""
    return list(getattr(optimizer, "chained_optimizers", [optimizer]))


def held_slots(optimizer: MegatronOptimizer) -> Iterator[tuple[Tensor, Slots]]:
    """Every parameter whose slots this rank has to write; a collective over replicas.

    The tensors are the optimizer's own, or on the host where they had to be put together.
    """
    for each in chained(optimizer):
        if isinstance(each, DistributedOptimizer):
            yield from _gathered(each)
        else:
            for parameter, main in _mains(each):
                moments = _moments(each.optimizer, main)
                yield parameter, _with_main(parameter, main, moments)


def empty_slots(optimizer: MegatronOptimizer) -> Iterator[tuple[Tensor, Slots]]:
    """Every parameter with slots of zeros on the host, to be read into."""
    for each in chained(optimizer):
        names = [MAIN, *MOMENTS] if _is_mixed(each) else list(MOMENTS)
        for parameter in _parameters(each):
            yield parameter, {name: _host_zeros(parameter) for name in names}


def fill_slots(
    optimizer: MegatronOptimizer, slots_of: Callable[[Tensor], Slots], step: int
) -> None:
    """Give the optimizer the slots of each parameter, as `empty_slots` names them, and its step."""
    for each in chained(optimizer):
        sliced = isinstance(each, DistributedOptimizer)
        slices = _slices(each) if sliced else {p: (m, None) for p, m in _mains(each)}
        for parameter, (main, part) in slices.items():
            found = slots_of(parameter)
            taken = found if part is None else {k: v.flatten()[part] for k, v in found.items()}
            if MAIN in taken:
                main.data.copy_(taken[MAIN])
            state = each.optimizer.state[main]
            for name in MOMENTS:
                if name not in state:
                    state[name] = torch.zeros_like(main.data)
                state[name].copy_(taken[name])
        _set_step(each.optimizer, step)


def step_of(optimizer: MegatronOptimizer) -> int:
    """Optimizer steps taken, which Adam's bias correction depends on; one number for all."""
    steps = {step for each in chained(optimizer) for step in _steps(each.optimizer)}
    assert len(steps) <= 1, f"parameters have taken different numbers of steps: {sorted(steps)}"
    return steps.pop() if steps else 0


def _steps(adam: torch.optim.Optimizer) -> Iterator[int]:
    """torch counts by parameter, fused Adams by group."""
    yield from (int(state["step"]) for state in adam.state.values() if "step" in state)
    yield from (int(group["step"]) for group in adam.param_groups if "step" in group)


def _set_step(adam: torch.optim.Optimizer, step: int) -> None:
    if isinstance(adam, (torch.optim.Adam, torch.optim.AdamW)):
        for state in adam.state.values():
            state["step"] = torch.tensor(float(step), dtype=torch.float32)
    else:
        for group in adam.param_groups:
            group["step"] = step


def _is_mixed(optimizer: Any) -> bool:
    """The model is bf16, the optimizer has weights of its own in fp32."""
    return bool(optimizer.config.bf16)


def _mains(optimizer: Any) -> Iterator[tuple[Tensor, Tensor]]:
    """Each parameter, and what the optimizer changes in its place: itself where it is fp32."""
    if not _is_mixed(optimizer):
        for group in optimizer.optimizer.param_groups:
            yield from ((parameter, parameter) for parameter in group["params"])
        return
    pairs = zip(optimizer.float16_groups, optimizer.fp32_from_float16_groups, strict=True)
    for parameters, mains in pairs:
        yield from zip(parameters, mains, strict=True)
    for group in optimizer.fp32_from_fp32_groups:
        yield from ((parameter, parameter) for parameter in group)


def _moments(adam: torch.optim.Optimizer, main: Tensor) -> Slots:
    """Zeros where no step has been taken."""
    state = adam.state.get(main, {})
    return {name: state[name] if name in state else torch.zeros_like(main) for name in MOMENTS}


def _with_main(parameter: Tensor, main: Tensor, moments: Slots) -> Slots:
    return moments if main is parameter else {MAIN: main.detach(), **moments}


def _parameters(optimizer: Any) -> list[Tensor]:
    """In an order that all ranks of a data-parallel group share."""
    if isinstance(optimizer, DistributedOptimizer):
        return [p for buffer in optimizer.buffers for p in buffer.param_index_map]
    return [parameter for parameter, _ in _mains(optimizer)]


def _slices(optimizer: Any) -> dict[Tensor, tuple[Tensor, slice | None]]:
    """Parameter -> the main weights that this rank holds of it, and where they lie in it."""
    found: dict[Tensor, tuple[Tensor, slice | None]] = {}
    for by_dtype in optimizer.gbuf_ranges:
        for buckets in by_dtype.values():
            for bucket in buckets:
                for parameter, ranges in bucket["param_map"].items():
                    group, order = optimizer.model_param_group_index_map[parameter]
                    main = optimizer.optimizer.param_groups[group]["params"][order]
                    part = ranges["param"]
                    found[parameter] = main, slice(part.start, part.end)
    return found


def _gathered(optimizer: Any) -> Iterator[tuple[Tensor, Slots]]:
    """Slots put together from all ranks of the group, each parameter kept by one in turn."""
    group, slices = optimizer.data_parallel_group, _slices(optimizer)
    names = [MAIN, *MOMENTS] if _is_mixed(optimizer) else list(MOMENTS)
    for number, parameter in enumerate(_parameters(optimizer)):
        keeps = number % group.size() == group.rank()
        held: Slots = {}
        main, part = slices.get(parameter, (None, None))
        moments = {} if main is None else _moments(optimizer.optimizer, main)
        for name in names:
            whole = torch.zeros(parameter.numel(), dtype=torch.float32, device=parameter.device)
            if main is not None:
                whole[part] = main.detach() if name == MAIN else moments[name]
            dist.all_reduce(whole, group=group)  # all but one bring zeros
            if keeps:
                held[name] = whole.view(parameter.shape).cpu()
        if keeps:
            yield parameter, held


def _host_zeros(parameter: Tensor) -> Tensor:
    return torch.zeros(parameter.shape, dtype=torch.float32, device="cpu")
