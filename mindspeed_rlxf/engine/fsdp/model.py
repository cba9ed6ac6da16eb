"""Build a role's model from transformers, shard it, and run it on micro-batches."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import MethodType
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.fsdp import (
    FSDPModule,
    MixedPrecisionPolicy,
    fully_shard,
    register_fsdp_forward_method,
)

from mindspeed_rlxf import device
from mindspeed_rlxf.config.enums import Recompute
from mindspeed_rlxf.config.hf_config import read_text_config
from mindspeed_rlxf.config.schema import LearningConfig, RoleConfig
from mindspeed_rlxf.device import worlds
from mindspeed_rlxf.engine.fsdp import attention
from mindspeed_rlxf.models.heads import Linear, fp32_linear
from mindspeed_rlxf.models.parameters import Head

PACKABLE = {"full_attention", "sliding_attention"}
"""Kinds of layers in which tokens see each other by attention alone."""

Read = Callable[[Tensor], Any]
"""(last hidden states of this rank's tokens, [tokens, hidden]) -> a tensor, or a tuple with one."""


@dataclass(frozen=True)
class Groups:
    """The process groups of a role; all its ranks share the sharded weights.

    Attributes:
        mesh: One axis, over all ranks.
        cp: Neighbouring ranks that share the tokens of a micro-batch; None = one rank each.
        dp_host: The ranks with the same place in their `cp`, for host tensors.
        saving: All ranks, for checkpoints, which are written beside training.
    """

    mesh: Any
    cp: dist.ProcessGroup | None
    dp_host: dist.ProcessGroup
    saving: dist.ProcessGroup

    @classmethod
    def of(cls, cp: int) -> Groups:
        """Make or reuse the groups for this context-parallel size; a collective over the world."""
        groups = worlds.groups_of_layout(("fsdp", cp), lambda: _make_groups(cp))
        return cls(**groups)


def _make_groups(cp: int) -> dict[str, Any]:
    """Make all ranks' groups, in the same order on every rank; return this rank's by field."""
    world_size = dist.get_world_size()
    rank = dist.get_rank()
    ranks = list(range(world_size))
    groups = {
        "mesh": dist.init_device_mesh(device.current_device().type, (world_size,)),
        "cp": None,
        "saving": dist.new_group(ranks, backend="gloo"),
    }
    for cp_rank in range(cp):
        group = dist.new_group(ranks[cp_rank::cp], backend="gloo")
        if rank % cp == cp_rank:
            groups["dp_host"] = group
    if cp > 1:
        for start in range(0, world_size, cp):
            group = dist.new_group(ranks[start : start + cp])
            if start <= rank < start + cp:
                groups["cp"] = group
    worlds.set_timeout(group for group in groups.values() if isinstance(group, dist.ProcessGroup))
    return groups


@contextlib.contextmanager
def _parameters_on_meta(dtype: torch.dtype) -> Iterator[None]:
    """Create parameters without storage inside the block; buffers, such as rotary ones, are real.

    Modules allocate a parameter before they register it; memory that nobody touches costs nothing.
    """
    register = nn.Module.register_parameter

    def on_meta(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        if parameter is not None and not parameter.is_meta:
            wide = dtype if parameter.is_floating_point() else parameter.dtype
            parameter = nn.Parameter(parameter.detach().to("meta", wide), parameter.requires_grad)
        register(module, name, parameter)

    nn.Module.register_parameter = on_meta  # type: ignore
    try:
        yield
    finally:
        nn.Module.register_parameter = register  # type: ignore[method-assign]


def build(folder: str, head: Head, dtype: torch.dtype) -> Any:
    """Build the folder's causal language model, with parameters on the meta device.

    A score head replaces the output layer, and is not tied.

    Raises:
        ValueError: The model cannot be read (`read_text_config`), or a row's results depend on the
            rows that were computed before it.
    """
    from transformers import AutoModelForCausalLM

    attention.register()
    config = read_text_config(Path(folder))
    check_rotary(config)
    config.dtype = dtype
    if head is Head.SCORE:
        config.tie_word_embeddings = False
    with _parameters_on_meta(dtype):
        model = AutoModelForCausalLM.from_config(config)
        if head is Head.SCORE:
            model.lm_head = nn.Linear(config.hidden_size, 1, bias=False)
    if packs(model):
        model.config._attn_implementation = attention.NAME
    _remove_noise(model)
    reach_experts(model)
    return model


def packs(model: Any) -> bool:
    """Return whether sequences may be packed: tokens see each other by attention alone.

    In other models a row has one sequence. The probe of the engine checks both.
    """
    layer_kinds = getattr(model.config, "layer_types", None) or ()
    if not PACKABLE.issuperset(layer_kinds) or runs_rows_alone(model):
        return False
    return bool(model._supports_attention_backend)


def runs_rows_alone(model: Any) -> bool:
    """Return whether a pass must have one row: LongRoPE's angles depend on the longest one."""
    return "longrope" in rope_types(model.config)


def rope_settings(config: Any) -> list[dict[str, Any]]:
    """Return the settings of rotary embeddings in config.json, one for each kind of layer.

    transformers 4 names them `rope_scaling`, 5 `rope_parameters`; 5 may nest them by layer kind.
    """
    settings = getattr(config, "rope_parameters", None)
    settings = settings or getattr(config, "rope_scaling", None) or {}
    nested = [value for value in settings.values() if isinstance(value, dict)]
    return nested or [settings]


def rope_types(config: Any) -> set[str]:
    """Return the types of rotary embeddings that the model's layers have."""
    return {_rope_type(settings) for settings in rope_settings(config)}


def _rope_type(settings: dict[str, Any]) -> Any:
    return settings.get("rope_type", settings.get("type", "default"))


def original_length(config: Any) -> int:
    """Return the length beyond which scaled rotary embeddings may have other angles.

    0 = none are scaled.
    """
    name = "original_max_position_embeddings"
    longest = 0
    for settings in rope_settings(config):
        if _rope_type(settings) != "default":
            original = settings.get(name) or getattr(config, name, None)
            longest = max(longest, original or config.max_position_embeddings)
    return longest


def check_rotary(config: Any) -> None:
    """Raise ValueError for rotary embeddings whose angles follow the longest row until now."""
    for kind in rope_types(config):
        if "dynamic" in kind:
            raise ValueError(
                f"config.json must not have rope_type={kind}, whose angles in a row depend on the "
                "other rows; remove rope_scaling, which has no effect on rows of up to "
                "max_position_embeddings tokens, or use another model"
            )


def window_of(config: Any) -> int | None:
    """Return the window that some layers' attention has by config.json; None = no layer has one."""
    kinds = getattr(config, "layer_types", None)
    if kinds and "sliding_attention" not in kinds:
        return None
    return getattr(config, "sliding_window", None) or None


def _remove_noise(model: Any) -> None:
    """Switch off dropout and noise; give the padding token's embedding a gradient."""
    for owner in (*model.modules(), model.config):
        if isinstance(owner, nn.Dropout):
            owner.p = 0.0
        for name, value in vars(owner).items():
            if isinstance(value, float) and ("drop" in name or "jitter" in name):
                setattr(owner, name, 0.0)
    model.get_input_embeddings().padding_idx = None


def reach_experts(model: nn.Module) -> None:
    """Give experts without tokens gradients of 0, as all ranks must have those of a layer.

    Experts are modules of their own in transformers 4, which leaves out some of them.
    """

    def reach(module: Any, _: Any, output: Any) -> Any:
        zero = sum(parameter.flatten()[0] for parameter in module.experts.parameters()) * 0
        if isinstance(output, tuple):  # with the router's logits
            return (output[0] + zero, *output[1:])
        return output + zero

    for module in model.modules():
        if isinstance(getattr(module, "experts", None), nn.ModuleList):
            module.register_forward_hook(reach)


def decoder_layers(model: Any) -> list[Any]:
    """Return the layers that are sharded, and recomputed, one by one."""
    names = set(model._no_split_modules or ())
    layers = [module for module in model.modules() if type(module).__name__ in names]
    return layers or list(getattr(model, model.base_model_prefix).layers)


def shard(model: Any, role: RoleConfig, trained: Collection[str], groups: Groups) -> None:
    """Shard the model layer by layer over all ranks, and allocate this rank's shards.

    Gradients are fp32 sums over the ranks, of the parameters named in `trained`. Parameters are not
    set; buffers keep their values.
    """
    if isinstance(role, LearningConfig) and role.recompute is not Recompute.NONE:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name in trained)
    model.rlxf_run = MethodType(_run, model)
    options = {"mesh": groups.mesh}
    if trained and role.bf16:
        options["mp_policy"] = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    for layer in decoder_layers(model):
        fully_shard(layer, **options)
    fully_shard(model, **options)
    register_fsdp_forward_method(model, "rlxf_run")
    for module in model.modules():
        if isinstance(module, FSDPModule) and sums_gradients():
            module.set_force_sum_reduction_for_comms(True)
            module.set_gradient_divide_factor(1.0)
    # `to_empty` leaves buffers without their values, so we copy these back.
    target = device.current_device()
    buffers = {name: buffer.to(target) for name, buffer in model.named_buffers()}
    model.to_empty(device=target)
    for name, buffer in model.named_buffers():
        buffer.copy_(buffers[name])


def sums_gradients() -> bool:
    """Return whether this torch can sum gradients over the ranks; older ones take their mean."""
    return hasattr(FSDPModule, "set_force_sum_reduction_for_comms")


def _run(
    model: Any, ids: Tensor, positions: Tensor | None, layout: attention.Layout, read: Read
) -> Any:
    """Run the model below its head on token ids [rows, tokens], then `read`.

    A method of the sharded model, so that its root's parameters are there in `read`.
    """
    body = getattr(model, model.base_model_prefix)
    extra_arguments = {"layout": layout} if packs(model) else {}
    outputs = body(input_ids=ids, position_ids=positions, use_cache=False, **extra_arguments)
    # Padded rows are flattened token by token, as micro-batches count their places.
    return read(outputs.last_hidden_state.transpose(0, 1).flatten(0, 1))


def linear_of(model: Any, fp32_head: bool) -> Linear:
    """Return what computes logits from states and head weights, with the model's cap if any."""
    linear = fp32_linear if fp32_head else F.linear
    cap = getattr(model.config, "final_logit_softcapping", None)
    if cap is None:
        return linear
    return lambda hidden, weight: torch.tanh(linear(hidden, weight) / cap) * cap
