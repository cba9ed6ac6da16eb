"""The Megatron module in every role: embedding, decoder, and a language-model or score head.

A module is one pipeline stage, or a chunk in a stage. `forward` ends at the hidden states. From the
last stage's, callers compute log-probs, values, scores or logits (`heads.py`, `ScoreHead`), only
for the tokens they need.
"""

from typing import Any

import torch
import torch.nn.functional as F
from megatron.core import parallel_state, tensor_parallel
from megatron.core.models.common.embeddings import rope_utils
from megatron.core.models.common.embeddings.language_model_embedding import LanguageModelEmbedding
from megatron.core.models.common.language_module.language_module import LanguageModule
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.transformer import torch_norm
from megatron.core.transformer.enums import ModelType
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_block import (
    TransformerBlock,
    TransformerBlockSubmodules,
    get_num_layers_to_build,
)
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor
from torch.nn import Parameter

from mindspeed_rlxf import device
from mindspeed_rlxf.config.enums import Recompute
from mindspeed_rlxf.config.schema import ArchitectureConfig, LearningConfig
from mindspeed_rlxf.device import kernels, megatron_versions
from mindspeed_rlxf.models.attention import (
    Attend,
    CoreAttention,
    FusedAttention,
    inverse_frequencies,
    rotary_angles,
)
from mindspeed_rlxf.models.experts import moe_settings, use_own_router
from mindspeed_rlxf.models.grouped_experts import GroupedMLP
from mindspeed_rlxf.models.heads import Linear
from mindspeed_rlxf.models.parameters import Head, Split, padded_vocab_size, stage_parameters


class RMSNorm(MegatronModule):
    """Root-mean-square norm (arXiv:1910.07467) in fp32; works with sequence parallelism."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5) -> None:
        super().__init__(config=config)
        self.eps = eps
        self.weight = Parameter(torch.ones(hidden_size, dtype=config.params_dtype))
        # Megatron sums such gradients over the tensor-parallel ranks, each of which saw a part.
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, hidden: Tensor) -> Tensor:
        """Normalise in fp32, then scale in the input's dtype."""
        normed = F.rms_norm(hidden.float(), (hidden.size(-1),), eps=self.eps)
        return self.weight * normed.to(hidden.dtype)


class ScoreHead(MegatronModule):
    """Computes one number per hidden state; the weight is not split over ranks."""

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__(config=config)
        self.weight = Parameter(torch.zeros(1, config.hidden_size, dtype=config.params_dtype))

    def forward(self, hidden: Tensor) -> Tensor:
        """Score hidden states: [tokens, hidden] -> [tokens] fp32."""
        return F.linear(hidden.float(), self.weight.float()).squeeze(-1)


class TransformerModel(LanguageModule):
    """One pipeline stage, or a model chunk in one."""

    linear: Linear = staticmethod(F.linear)  # computes logits

    def __init__(
        self,
        config: TransformerConfig,
        architecture: ArchitectureConfig,
        head: Head,
        pre_process: bool,
        post_process: bool,
        vp_stage: int | None = None,
    ) -> None:
        """Build this rank's layers, with weights unset, in Megatron's active groups.

        A collective between first and last stage if they share the embedding (an all-reduce).

        Args:
            config: Megatron's configuration.
            architecture: model sizes.
            head: the last stage's head.
            pre_process: whether the stage has the embedding (the first one).
            post_process: whether the stage has final norm and head (the last one).
            vp_stage: model chunk number if a rank has several, else None.
        """
        super().__init__(config=config)
        self.vp_stage = vp_stage
        # Megatron-core 0.16 sets these to the same values, 0.12 has no such attributes.
        self.vp_size = config.virtual_pipeline_model_parallel_size
        self.tp_group = parallel_state.get_tensor_model_parallel_group()
        self.pp_group = parallel_state.get_pipeline_model_parallel_group()
        self.model_type = ModelType.encoder_or_decoder  # read by Megatron's schedules
        self.architecture = architecture
        self.head = head
        self.pre_process = pre_process
        self.post_process = post_process
        self.share_embeddings_and_output_weights = (
            head is Head.LANGUAGE_MODEL and not architecture.untie_embeddings_and_output_weights
        )
        vocab_size = padded_vocab_size(architecture, config.tensor_model_parallel_size)
        if pre_process:
            self.embedding = LanguageModelEmbedding(
                config, vocab_size, architecture.max_position_embeddings, "none"
            )
        self.decoder = TransformerBlock(
            config,
            layer_spec(config, vp_stage),
            pre_process=pre_process,
            post_process=post_process,
            **megatron_versions.chunk_argument(vp_stage),
        )
        if post_process and head is Head.SCORE:
            self.score = ScoreHead(config)
        elif post_process:
            self.output_layer = tensor_parallel.ColumnParallelLinear(
                config.hidden_size,
                vocab_size,
                config=config,
                init_method=config.init_method,
                bias=False,
                skip_weight_param_allocation=pre_process
                and self.share_embeddings_and_output_weights,
            )
        if head is Head.LANGUAGE_MODEL and (pre_process or post_process):
            self.setup_embeddings_and_output_layer()
        self.inverse_frequencies = inverse_frequencies(architecture)
        self._mark_shards()

    def _mark_shards(self) -> None:
        """Mark parameters split over tensor-parallel ranks, for the gradient norm.

        Megatron marks them only when initialising weights, which we skip. For unmarked ones it
        counts only tensor-parallel rank 0's gradient.
        """
        pp = self.pp_group.size()
        chunks = self.vp_size or 1
        stage = (self.vp_stage or 0) * pp + self.pp_group.rank()
        table = stage_parameters(
            self.architecture,
            self.head,
            stage,
            pp * chunks,
            ep=self.config.expert_model_parallel_size,  # their names are the same on every rank
        )
        tensors = dict(self.named_parameters())
        for parameter in table:
            tensor = tensors[parameter.name]
            is_marked = hasattr(tensor, "tensor_model_parallel")  # Megatron does mark biases
            if parameter.split is not Split.REPLICATED and not is_marked:
                axis = 1 if parameter.split is Split.COLUMNS else 0
                tensor_parallel.set_tensor_model_parallel_attributes(tensor, True, axis, 1)

    def set_input_tensor(self, input_tensor: Tensor | list[Tensor]) -> None:
        """Set the previous stage's hidden states; Megatron's schedule calls it."""
        tensors = input_tensor if isinstance(input_tensor, list) else [input_tensor]
        self.decoder.set_input_tensor(tensors[0])

    def forward(self, token_ids: Tensor, positions: Tensor, attend: Attend | None) -> Tensor:
        """Compute this stage's hidden states, [s, b, hidden].

        With sequence parallelism the result is this rank's share along the first axis.

        Args:
            token_ids: [b, s] int64, for the first stage; others read the previous stage's hidden
                states (`set_input_tensor`).
            positions: [s] int64.
            attend: for packed tokens, b = 1; None = each row attends causally.
        """
        hidden = self.embedding(token_ids, None) if self.pre_process else None
        if hidden is not None:
            # The embedding's [s, 1, hidden] has the strides of [1, s, hidden]. With them torch
            # multiplies by a weight that needs no gradient token by token, in a batched product.
            hidden = hidden.flatten(0, 1).unflatten(0, hidden.shape[:2])
            if torch.is_grad_enabled():
                # Of a frozen embedding: recomputation gives no gradient if no input needs one.
                hidden.requires_grad_()
        self.inverse_frequencies = self.inverse_frequencies.to(positions.device)  # moves once
        angles = rotary_angles(positions, self.inverse_frequencies)
        return self.decoder(
            hidden_states=hidden,
            attention_mask=None,
            rotary_pos_emb=angles if attend is None else angles.squeeze(1),  # as query and key
            packed_seq_params=attend,
        )

    @property
    def vocab_size(self) -> int:
        """Tokens; the embedding may have more rows."""
        return self.architecture.vocab_size

    @property
    def output_weight(self) -> Tensor:
        """The last stage's language-model head weight, [padded vocab / tp, hidden].

        With tied embeddings the embedding's, or this stage's copy.
        """
        if self.share_embeddings_and_output_weights:
            return self.shared_embedding_or_output_weight()
        return self.output_layer.weight

    def full_hidden(self, hidden: Tensor, partial_gradient: bool) -> Tensor:
        """Return all tokens' hidden states, [s * b, hidden], ordered as [s, b].

        With sequence parallelism a collective that gathers them.

        Args:
            hidden: result from `forward`.
            partial_gradient: True = each tensor-parallel rank computes something else from them (a
                vocabulary shard), so backward sums the ranks' gradients; False = all compute the
                same.
        """
        if self.config.sequence_parallel:
            hidden = tensor_parallel.gather_from_sequence_parallel_region(
                hidden, tensor_parallel_output_grad=partial_gradient
            )
        elif partial_gradient:
            hidden = tensor_parallel.copy_to_tensor_model_parallel_region(hidden)
        return hidden.flatten(0, 1)

    def sharded_state_dict(self, prefix="", sharded_offsets=(), metadata=None):  # type: ignore[no-untyped-def]
        """Return the state for Megatron's distributed checkpoints, also with a score head.

        Such a model lacks the output layer expected by Megatron's own method.
        """
        with megatron_versions.current_chunk(self.vp_stage):
            if self.head is Head.SCORE:
                return MegatronModule.sharded_state_dict(self, prefix, sharded_offsets, metadata)
            return super().sharded_state_dict(prefix, sharded_offsets, metadata)


def plain_norm(config: TransformerConfig) -> type[torch.nn.Module]:
    """Return the norm class: in bf16 and fp16 the device's fused one if it works, else RMSNorm.

    Not used on devices with MindSpeed's norms.
    """
    half = config.params_dtype in (torch.bfloat16, torch.float16)
    fused = kernels.find(kernels.Operator.NORM) if half else None
    if fused is None:
        return RMSNorm

    class FusedNorm(fused):  # type: ignore[misc, valid-type]
        def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5) -> None:
            parallel = {"sequence_parallel": config.sequence_parallel}
            super().__init__(hidden_size, eps=eps, params_dtype=config.params_dtype, **parallel)

    return FusedNorm


def layer_spec(
    config: TransformerConfig, vp_stage: int | None = None
) -> TransformerBlockSubmodules:
    """Return this stage's layer specification, from Megatron's local specification.

    Core attention and router are ours. Norms and experts are `plain_norm` and GroupedMLP; on an NPU
    Megatron's classes, which MindSpeed replaces by fused operators. With experts it has the side
    effect described in `use_own_router`.
    """
    # By its name at this moment: MindSpeed replaces the class itself.
    norm = torch_norm.WrappedTorchNorm if device.fuses_layers() else plain_norm(config)
    spec = get_gpt_layer_local_spec(
        num_experts=config.num_moe_experts,
        normalization="RMSNorm",
        qk_layernorm=config.qk_layernorm,
    )
    layer = spec.submodules
    if config.num_moe_experts is not None:
        use_own_router(layer.mlp)
        if not device.fuses_layers():
            layer.mlp.submodules.experts.module = GroupedMLP
    layer.input_layernorm = layer.pre_mlp_layernorm = norm
    attention = layer.self_attention.submodules
    attention.core_attention = FusedAttention if device.fuses_layers() else CoreAttention
    if config.qk_layernorm:
        attention.q_layernorm = attention.k_layernorm = norm
    num_layers = get_num_layers_to_build(config, **megatron_versions.chunk_argument(vp_stage))
    return TransformerBlockSubmodules(layer_specs=[spec] * num_layers, layer_norm=norm)


def recompute_settings(role: LearningConfig) -> dict[str, Any]:
    """Return Megatron's activation recomputation settings for a role; {} for none.

    Elementwise recomputation covers norms, and `recompute_activations` the gated activations.
    Selective recomputation covers the MLP or experts, which keep the most activations. Megatron's
    default, the core attention, would save nothing: fused kernels keep no scores. Full
    recomputation uses the role's method and layer count.
    """
    if role.recompute is Recompute.NONE:
        return {}
    if role.recompute is Recompute.ELEMENTWISE:
        return {"recompute_granularity": "selective", "recompute_modules": ["layernorm"]}
    if role.recompute is Recompute.SELECTIVE:
        module = "mlp" if role.architecture.num_experts is None else "moe"
        return {"recompute_granularity": "selective", "recompute_modules": [module]}
    return {
        "recompute_granularity": "full",
        "recompute_method": role.recompute_method,
        "recompute_num_layers": role.recompute_num_layers,
    }


def _uses_fused_rotary(dtype: torch.dtype) -> bool:
    """Return whether the device has a fused rotary embedding, and give it to Megatron."""
    if not _works(kernels.Operator.ROTARY, dtype):
        return False
    # Megatron's own name, of Transformer Engine's operator, does not take packed tokens.
    rope_utils.fused_apply_rotary_pos_emb = kernels.find(kernels.Operator.ROTARY)
    return True


def _works(operator: kernels.Operator, dtype: torch.dtype) -> bool:
    return dtype is torch.bfloat16 and kernels.find(operator) is not None


def transformer_config(
    architecture: ArchitectureConfig,
    tp: int = 1,
    pp: int = 1,
    sequence_parallel: bool = False,
    dtype: torch.dtype = torch.float32,
    chunks: int = 1,
    ep: int = 1,
    recompute: dict[str, Any] | None = None,
) -> TransformerConfig:
    """Return Megatron's configuration for a model on tp * pp ranks.

    Fusions needing extra kernels are on if the device has them (`device.kernels`), the activation's
    if MindSpeed has one. No dropout; no weight is initialised.

    Args:
        architecture: model sizes.
        tp: tensor-parallel size.
        pp: pipeline-parallel size.
        sequence_parallel: split activations over tp ranks.
        dtype: for parameters and activations.
        chunks: model chunks per pipeline rank.
        ep: expert-parallel size.
        recompute: from `recompute_settings`; None = keep all activations.
    """
    a = architecture
    # With chunks the interleaved schedule may send forward and backward between the same two ranks.
    # This needs one exchange for each direction (overlap_p2p_comm): in one batch they would be
    # mixed up with two stages.
    return TransformerConfig(
        num_layers=a.num_layers,
        hidden_size=a.hidden_size,
        ffn_hidden_size=a.ffn_hidden_size,
        num_attention_heads=a.num_attention_heads,
        num_query_groups=a.kv_heads,
        kv_channels=a.head_dim,
        layernorm_epsilon=a.norm_epsilon,
        normalization="RMSNorm",
        gated_linear_unit=True,
        activation_func=F.silu,
        add_bias_linear=False,
        add_qkv_bias=a.add_qkv_bias,
        qk_layernorm=a.qk_layernorm,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        tensor_model_parallel_size=tp,
        pipeline_model_parallel_size=pp,
        virtual_pipeline_model_parallel_size=chunks if chunks > 1 else None,
        overlap_p2p_comm=chunks > 1,
        batch_p2p_comm=chunks == 1,
        sequence_parallel=sequence_parallel and tp > 1,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        bf16=dtype is torch.bfloat16,
        variable_seq_lengths=True,
        moe_token_dispatcher_type="alltoall",  # the default refuses variable lengths, even dense
        **moe_settings(a, tp, ep),
        **(recompute or {}),
        calculate_per_token_loss=True,
        use_cpu_initialization=True,
        perform_initialization=False,  # every weight is loaded or set by name
        masked_softmax_fusion=False,
        bias_activation_fusion=device.fuses_layers() or _works(kernels.Operator.SWIGLU, dtype),
        bias_dropout_fusion=False,
        apply_rope_fusion=_uses_fused_rotary(dtype),
        gradient_accumulation_fusion=_works(kernels.Operator.GRADIENT, dtype),
        persist_layer_norm=False,
        deterministic_mode=torch.are_deterministic_algorithms_enabled(),
    )
