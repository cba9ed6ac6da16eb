"""Build a role's model, optimizer and schedule on this rank."""

import itertools
from collections.abc import Sequence
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.optimizer import (
    OptimizerConfig as MegatronOptimizerConfig,
    clip_grads,
    get_megatron_optimizer,
)
from megatron.core.optimizer.optimizer import MegatronOptimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from mindspeed_rlxf import device
from mindspeed_rlxf.config.enums import Recompute
from mindspeed_rlxf.config.schema import LearningConfig, OptimizerConfig, RoleConfig
from mindspeed_rlxf.device import megatron_versions
from mindspeed_rlxf.engine.parallel import ParallelGroups
from mindspeed_rlxf.engine.step_guard import gradient_norm
from mindspeed_rlxf.models.adapters import attach_adapters
from mindspeed_rlxf.models.grouped_experts import stack_experts
from mindspeed_rlxf.models.heads import fp32_linear
from mindspeed_rlxf.models.parameters import Head, stage_parameters
from mindspeed_rlxf.models.recompute import recompute_activations
from mindspeed_rlxf.models.transformer import (
    TransformerModel,
    recompute_settings,
    transformer_config,
)


def build_chunks(
    role: RoleConfig, head: Head, groups: ParallelGroups, dtype: torch.dtype
) -> list[TransformerModel]:
    """Build this pipeline rank's model chunks on the device; one without virtual pipeline.

    Weights are not set; expert weights are 0. With `lora` in the role all but adapters and a score
    head is frozen; with `freeze: attention` the attention layers are.
    """
    assert role.architecture is not None, "checked beforehand"
    count = role.model_chunks
    config = transformer_config(
        role.architecture,
        groups.tp.size(),
        groups.pp.size(),
        role.sequence_parallel,
        dtype,
        count,
        groups.ep.size(),
        recompute_settings(role) if isinstance(role, LearningConfig) else None,
    )
    chunks = []
    for chunk in range(count):
        vp_stage = chunk if count > 1 else None
        with megatron_versions.current_chunk(vp_stage):
            module = TransformerModel(
                config,
                role.architecture,
                head,
                pre_process=groups.is_first_stage and chunk == 0,
                post_process=groups.is_last_stage and chunk == count - 1,
                vp_stage=vp_stage,
            )
        if role.has_fp32_logits:
            module.linear = fp32_linear
        chunks.append(module.to(device=device.current_device(), dtype=dtype))
        stack_experts(chunks[-1])
        if isinstance(role, LearningConfig) and role.recompute is Recompute.ELEMENTWISE:
            recompute_activations(chunks[-1])
        if role.freezes_attention:
            for layer in chunks[-1].decoder.layers:
                layer.self_attention.requires_grad_(False)
        if role.adapters.rank:
            stage = chunk * groups.pp.size() + groups.pp.rank(), groups.pp.size() * count
            table = stage_parameters(role.architecture, head, *stage)
            attach_adapters(chunks[-1], table, role.architecture, groups.tp.size(), role.adapters)
    return chunks


def wrap(chunk: TransformerModel, optimizer: OptimizerConfig) -> DistributedDataParallel:
    """Wrap a chunk in Megatron's data parallelism, which sums fp32 gradients over replicas.

    Sets `reduced_early` on each parameter: whether its gradient is reduced during the backward
    pass. Hooks that gather weights in forward passes start switched off.
    """
    config = DistributedDataParallelConfig(
        grad_reduce_in_fp32=True,
        use_distributed_optimizer=optimizer.use_distributed_optimizer,
        overlap_grad_reduce=optimizer.overlap_grad_reduce,
        overlap_param_gather=optimizer.gathers_ahead,
    )
    model = DistributedDataParallel(chunk.config, config, chunk)
    for parameter in chunk.parameters():
        parameter.reduced_early = optimizer.overlap_grad_reduce  # type: ignore[attr-defined]
    if optimizer.gathers_ahead:
        model.disable_forward_pre_hook(param_sync=False)
    return model


def set_gather_in_forward(models: Sequence[Any], enabled: bool) -> None:
    """Switch weight gathering in forward passes on or off, after a step has changed the weights.

    Switching off gathers all weights at once. Generation, checkpoints and exports need it off,
    because they read weights without a forward pass. No effect unless the configuration gathers
    ahead.
    """
    for model in models:
        hooked = _gathers_in_forward(model)
        if model.use_forward_hook and enabled and not hooked:
            model.enable_forward_pre_hook()
        elif hooked and not enabled:
            model.disable_forward_pre_hook(param_sync=True)


def await_gathers(model: Any) -> None:
    """Wait for weight gathers that this chunk's forward pass started and did not wait for.

    Megatron waits when it calls a weight's module. The head weight is read after the forward pass,
    without calling its module.
    """
    if _gathers_in_forward(model):
        # Buckets are numbered from the last weight to the first.
        for group in reversed(model.bucket_groups + model.expert_parallel_bucket_groups):
            group.finish_param_sync()


def _gathers_in_forward(model: Any) -> bool:
    return bool(getattr(model, "remove_forward_pre_hook_handles", None))


def connect_schedule(
    config: TransformerConfig, models: Sequence[Any], optimizer: MegatronOptimizer
) -> None:
    """Set the functions in `config` that Megatron's schedule uses to scale and reduce gradients.

    Gradients are reduced after the last micro-batch. Megatron skips the reduction if `config` lacks
    these functions.
    """
    config.finalize_model_grads_func = finalize_gradients
    config.grad_scale_func = optimizer.scale_loss
    pauses = [model.no_sync for model in models]
    config.no_sync_func = pauses if len(pauses) > 1 else pauses[0]


def finalize_gradients(
    models: list[Any], num_tokens: Tensor | None = None, *arguments: Any, **keys: Any
) -> None:
    """Finish a step's gradients like Megatron's `finalize_model_grads`, without a wait of the host.

    Megatron's own asks the device whether `num_tokens`, the mini-batch's weight, is above 0.
    """
    finalize_model_grads(models, None, *arguments, **keys)
    if num_tokens is None:
        return
    last_rank = parallel_state.get_pipeline_model_parallel_last_rank()
    pp_group = parallel_state.get_pipeline_model_parallel_group()
    torch.distributed.broadcast(num_tokens, src=last_rank, group=pp_group)
    replicas = parallel_state.get_data_parallel_group(with_context_parallel=True)
    torch.distributed.all_reduce(num_tokens, group=replicas)
    for model in models:
        model.scale_gradients(1.0 / num_tokens.clamp(min=1))


def build_optimizer(
    config: OptimizerConfig, models: list[DistributedDataParallel], dtype: torch.dtype
) -> MegatronOptimizer:
    """Build Adam with decoupled weight decay, and fp32 main weights if the model is bf16.

    Args:
        config: Optimizer settings.
        models: This rank's chunks, wrapped for data parallelism.
        dtype: Model dtype.
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


def measure_in_rows() -> None:
    """Let Megatron use `gradient_norm` on a CPU, and where it has no fused operator for the norm.

    Without Transformer Engine and Apex it reads the norm of each gradient from the device.
    """
    is_plain = clip_grads.l2_norm_impl.__module__.startswith("megatron.")
    if device.current_device().type == "cpu" or is_plain:
        clip_grads.l2_norm_impl = _l2_norm


def _l2_norm(
    chunk_size: int, noop_flag: Tensor, tensor_lists: list[list[Tensor]], per_tensor: bool
) -> tuple[Tensor, None]:
    """Return the norm of all tensors, with the signature of apex's `multi_tensor_l2norm`."""
    return gradient_norm(itertools.chain(*tensor_lists)).view(1), None


def build_scheduler(
    config: OptimizerConfig, optimizer: MegatronOptimizer, train_iters: int
) -> OptimizerParamScheduler:
    """Build the learning-rate schedule over `train_iters` iterations, one step each.

    It warms up from 0, the first iteration's rate, over the fraction `lr_warmup_fraction`, then
    decays by `lr_decay_style`. Sets the first rate in the optimizer.
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
