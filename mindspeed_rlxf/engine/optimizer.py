"""Megatron's optimizer and learning-rate schedule from our configuration."""

from __future__ import annotations

import torch
from megatron.core.distributed import DistributedDataParallel
from megatron.core.optimizer import OptimizerConfig as MegatronOptimizerConfig
from megatron.core.optimizer import get_megatron_optimizer
from megatron.core.optimizer.optimizer import MegatronOptimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

from mindspeed_rlxf.config.schema import OptimizerConfig
from mindspeed_rlxf.device import megatron_versions


def build_optimizer(
    config: OptimizerConfig, models: list[DistributedDataParallel], dtype: torch.dtype
) -> MegatronOptimizer:
    """Build Adam with decoupled weight decay, with fp32 main weights if the model is bf16.

    models: this rank's chunks, wrapped for data parallelism; dtype: of the model
    """
    return get_megatron_optimizer(
        MegatronOptimizerConfig(
            optimizer="adam",
            lr=config.lr,
            min_lr=config.min_lr,
            weight_decay=config.weight_decay,
            adam_beta1=config.adam_beta1,
            adam_beta2=config.adam_beta2,
            adam_eps=config.adam_eps,
            # Megatron reports no norm when clipping is off; an infinite limit never clips.
            clip_grad=config.clip_grad or float("inf"),
            bf16=dtype is torch.bfloat16,
            params_dtype=dtype,
            use_distributed_optimizer=config.use_distributed_optimizer,
            **megatron_versions.gathers_ahead_argument(config.gathers_ahead),
        ),
        models,
    )


def build_scheduler(
    config: OptimizerConfig, optimizer: MegatronOptimizer, train_iters: int
) -> OptimizerParamScheduler:
    """Build the learning-rate schedule over `train_iters` iterations, one step each.

    It warms up from 0, the rate of the first iteration, over the fraction `lr_warmup_fraction`,
    then decays by `lr_decay_style`. Sets the first rate in the optimizer.
    """
    return OptimizerParamScheduler(
        optimizer,
        init_lr=0.0,
        max_lr=config.lr,
        min_lr=config.min_lr,
        lr_warmup_steps=int(config.lr_warmup_fraction * train_iters),
        lr_decay_steps=train_iters,
        lr_decay_style=config.lr_decay_style,
        start_wd=config.weight_decay,
        end_wd=config.weight_decay,
        wd_incr_steps=train_iters,
        wd_incr_style="constant",
    )
