"""AdamW over a rank's shards, with the learning-rate schedule of Megatron's engine."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from mindspeed_rlxf import device
from mindspeed_rlxf.config.schema import OptimizerConfig
from mindspeed_rlxf.engine.fsdp.model import sums_gradients
from mindspeed_rlxf.engine.step_guard import StepResult, gradient_norm, has_wrong_loss

MOMENTS = ("exp_avg", "exp_avg_sq")
EPSILON = 1e-6  # added to the norm that clips gradients, as Megatron does


def learning_rate(config: OptimizerConfig, train_iters: int, step: int) -> float:
    """Return the rate after `step` iterations: warm-up from 0, then decay (`lr_decay_style`)."""
    warmup = int(config.lr_warmup_fraction * train_iters)
    if warmup and step <= warmup:
        return config.lr * step / warmup
    if config.lr_decay_style == "constant":
        return config.lr
    if step > train_iters:
        return config.min_lr
    progress = (step - warmup) / (train_iters - warmup)
    if config.lr_decay_style == "linear":
        decay = 1 - progress
    else:
        decay = (math.cos(math.pi * progress) + 1) / 2
    return config.min_lr + decay * (config.lr - config.min_lr)


class ShardedAdam:
    """AdamW on plain tensors that share the storages of the model's shards.

    The model's gradients are sums over the ranks. `step` divides them by a weight, measures and
    clips them. Weight decay leaves out biases and tensors with one axis, as Megatron does.

    Attributes:
        mains: This rank's shards, by the model's names; empty shards are left out.
        scheduler_steps: Iterations that the learning rate has advanced.
    """

    def __init__(
        self, config: OptimizerConfig, parameters: Iterable[tuple[str, Tensor]], train_iters: int
    ) -> None:
        """Keep the trained parameters among these, by name."""
        self.config = config
        self.train_iters = train_iters
        self.scheduler_steps = 0
        self._factor = 1 if sums_gradients() else dist.get_world_size()  # of means over the ranks
        self._parameters: dict[str, Tensor] = {}
        self.mains: dict[str, nn.Parameter] = {}
        groups: dict[bool, list[nn.Parameter]] = {True: [], False: []}
        for name, parameter in parameters:
            local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
            if parameter.requires_grad and local.numel():
                self._parameters[name] = parameter
                self.mains[name] = nn.Parameter(local.detach())
                decays = parameter.dim() > 1 and not name.endswith("bias")
                groups[decays].append(self.mains[name])
        self.adam = torch.optim.AdamW(
            [
                {"params": params, "weight_decay": config.weight_decay * decays}
                for decays, params in groups.items()
            ],
            lr=config.lr,
            betas=(config.adam_beta1, config.adam_beta2),
            eps=config.adam_eps,
            fused=device.current_device().type in ("cpu", "cuda"),
        )
        self.advance(0)

    @property
    def rate(self) -> float:
        """The present learning rate."""
        return float(self.adam.param_groups[0]["lr"])

    def advance(self, iterations: int) -> None:
        """Advance the learning rate by some iterations."""
        self.scheduler_steps += iterations
        rate = learning_rate(self.config, self.train_iters, self.scheduler_steps)
        for group in self.adam.param_groups:
            group["lr"] = rate

    def step(self, losses: Sequence[Tensor], weight: float) -> StepResult:
        """Take a step, or skip it if a loss or the norm is not finite on any rank; a collective.

        Divides the gradients by `weight`, the sum over the mini-batch, and removes them afterwards.
        """
        grads: list[Tensor] = []
        for name, parameter in self._parameters.items():
            grad = parameter.grad
            parameter.grad = None
            if grad is None:
                continue
            grads.append(grad.to_local() if isinstance(grad, DTensor) else grad)
            self.mains[name].grad = grads[-1]
        torch._foreach_mul_(grads, self._factor / max(weight, 1))
        squares = gradient_norm(grads).square()
        sums = torch.stack((squares, has_wrong_loss(losses)))
        dist.all_reduce(sums)
        sum_of_squares, num_wrong_losses = sums.tolist()  # waits for the device
        norm = math.sqrt(sum_of_squares) if sum_of_squares >= 0 else math.nan
        not_finite = []
        if num_wrong_losses > 0:
            not_finite.append("loss")
        if not math.isfinite(norm):
            not_finite.append("gradient norm")
        if not not_finite:
            clip_factor = (self.config.clip_grad or math.inf) / (norm + EPSILON)
            if clip_factor < 1:
                torch._foreach_mul_(grads, clip_factor)
            self.adam.step()
        self.adam.zero_grad()
        return StepResult(norm, tuple(not_finite))

    def moments(self) -> dict[str, Tensor]:
        """Return the moments by `MOMENT/NAME`; new ones are zeros, and are the optimizer's own."""
        moments = {}
        for name, main in self.mains.items():
            state = self.adam.state[main]
            state.setdefault("step", torch.zeros((), dtype=torch.float32, device=main.device))
            for moment in MOMENTS:
                state.setdefault(moment, torch.zeros_like(main.data))
                moments[f"{moment}/{name}"] = state[moment]
        return moments

    @property
    def steps(self) -> int:
        """Optimizer steps taken; 0 on a rank without shards."""
        return max((int(state["step"]) for state in self.adam.state.values()), default=0)

    @steps.setter
    def steps(self, steps: int) -> None:
        for state in self.adam.state.values():
            state["step"].fill_(steps)

    def tensors(self) -> Iterable[Tensor]:
        """Yield the moments that are there."""
        for state in self.adam.state.values():
            yield from (state[moment] for moment in MOMENTS if moment in state)
