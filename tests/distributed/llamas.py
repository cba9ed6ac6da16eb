"""Random small models as Hugging Face folders, and configurations of runs that load them.

Most are Llamas; the architectures also cover Qwen2, Qwen3 and mixtures of experts.
"""

from collections.abc import Collection
from pathlib import Path
from typing import Any

import pytest
import torch
from packaging.version import Version

from mindspeed_rlxf.config import packages
from mindspeed_rlxf.config.architecture import SHARED_GROUPS_SINCE
from mindspeed_rlxf.config.enums import CONFIGURED, DeviceKind, RewardKind, Role
from mindspeed_rlxf.config.schema import (
    ActorConfig,
    AlgorithmConfig,
    ArchitectureConfig,
    CriticConfig,
    DataConfig,
    DeviceConfig,
    OptimizerConfig,
    RefConfig,
    RewardConfig,
    RoleConfig,
    RunConfig,
    RuntimeConfig,
    TrainingConfig,
)
from tests.families import config_keys, family_of
from tests.trl.record import make_tokenizer
from tests.unit.weights.folders_of import read_folder

# Whether this version of Megatron can share one key-value group among tensor-parallel ranks.
MEGATRON = packages.version(packages.MEGATRON) or "0"
SHARES_GROUPS = Version(MEGATRON).release >= SHARED_GROUPS_SINCE
shares_groups = pytest.mark.skipif(
    not SHARES_GROUPS, reason=f"megatron-core {MEGATRON} shares no query group"
)
MAX_NEW_TOKENS = 16
VOCAB = 37  # odd, so that tensor-parallel ranks have to pad the vocabulary
PLAIN = ArchitectureConfig(
    num_layers=2, hidden_size=32, ffn_hidden_size=48, num_attention_heads=4, num_query_groups=2,
    vocab_size=VOCAB, max_position_embeddings=128, untie_embeddings_and_output_weights=True,
)  # fmt: skip
TIED = PLAIN.model_copy(update={"untie_embeddings_and_output_weights": False})
QWEN2 = PLAIN.model_copy(update={"add_qkv_bias": True})
QWEN3 = PLAIN.model_copy(update={"qk_layernorm": True, "kv_channels": 12})
ONE_GROUP = QWEN2.model_copy(update={"num_query_groups": 1})
QWEN3_ONE_GROUP = QWEN3.model_copy(update={"num_query_groups": 1})
QWEN3_MOE = QWEN3.model_copy(
    update={"num_experts": 4, "moe_router_topk": 2, "moe_ffn_hidden_size": 20}
)
QWEN3_MOE_UNNORMED = QWEN3_MOE.model_copy(update={"moe_router_pre_softmax": True})
MIXTRAL = PLAIN.model_copy(update={"num_experts": 4, "moe_router_topk": 2})
SCALED = PLAIN.model_copy(update={
    "num_query_groups": 4, "rotary_base": 500000.0, "rope_scaling_type": "llama3",
    "rope_scaling_factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
})  # fmt: skip


def make_llama(
    folder: Path, architecture: ArchitectureConfig, scored: bool = False, seed: int = 0
) -> Any:
    """Write a random fp32 model to `folder` and return it, in eval mode.

    scored: with a score head in place of the language model's. The weights are large enough that
    every layer changes the output.
    """
    a = architecture
    scaling: dict[str, Any] | None = None
    if a.rope_scaling_type == "llama3":
        same = "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"
        scaling = {"rope_type": "llama3", "factor": a.rope_scaling_factor}
        scaling |= {name: getattr(a, name) for name in same}
    config_class, language_model, scorer = family_of(a)
    config = config_class(
        **config_keys(a),
        max_position_embeddings=a.max_position_embeddings,
        rms_norm_eps=a.norm_epsilon,
        rope_theta=a.rotary_base,  # version 5 of transformers reads this older spelling too
        rope_scaling=scaling,
        initializer_range=0.15,
        bos_token_id=None,
        eos_token_id=None,
    )
    torch.manual_seed(seed)
    model = (scorer if scored else language_model)(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.uniform_(0.5, 1.5)
            elif name.endswith("bias"):
                parameter.uniform_(-1.0, 1.0)
    model.save_pretrained(folder)
    return model.eval()


def make_pair(folder: Path, architecture: ArchitectureConfig) -> tuple[Path, Path]:
    """Write a language model and a model with a score head; return both folders."""
    lm, scored = folder / "lm", folder / "scored"
    make_llama(lm, architecture)
    make_llama(scored, architecture, scored=True)
    return lm, scored


def make_models(folder: Path, architecture: ArchitectureConfig) -> Path:
    """Write tokenizer, policy, value and reward model of a run below `folder`; return it."""
    make_tokenizer().save_pretrained(folder / "tokenizer")
    make_llama(folder / "lm", architecture)
    for seed, part in enumerate(("value", "reward"), start=1):
        make_llama(folder / part, architecture, scored=True, seed=seed)
    return folder


def same_tensors(one: Path, other: Path) -> bool:
    """Whether two Hugging Face folders have the same tensor names and, bit by bit, numbers."""
    ours, theirs = read_folder(one), read_folder(other)
    return ours.keys() == theirs.keys() and all(ours[name].equal(theirs[name]) for name in ours)


def greedy_response(model: Any, prompt: Any, eos: list[int]) -> list[int]:
    """Return the greedy response of transformers, at most MAX_NEW_TOKENS tokens, with its EOS."""
    with torch.no_grad():
        found = model.generate(
            torch.tensor(prompt)[None], attention_mask=torch.ones(1, len(prompt)),
            max_new_tokens=MAX_NEW_TOKENS, do_sample=False, eos_token_id=eos, pad_token_id=0,
        )  # fmt: skip
    response: list[int] = found[0, len(prompt) :].tolist()
    return response


def role_of(folder: Path, architecture: ArchitectureConfig, **keys: Any) -> RoleConfig:
    """Return a role that loads the folder. keys: further keys of RoleConfig"""
    return RoleConfig(model="t", architecture=architecture, load=str(folder), **keys)


def with_local_runtime(config: RunConfig) -> RunConfig:
    """Return a copy of the configuration with `runtime.kind=local`: each rank runs the driver."""
    return config.model_copy(update={"runtime": RuntimeConfig(kind="local")})


FSDP_POOL = "fsdp"
"""A pool whose processes do not load Megatron."""


def with_fsdp(config: RunConfig, roles: Collection[Role] = CONFIGURED, size: int = 1) -> RunConfig:
    """Return a copy in which these roles, the actor among them, compute with FSDP.

    They have a pool of their own with `size` devices.
    """
    sections = {
        role.value: config.role(role).model_copy(update={"backend": "fsdp"}) for role in roles
    }
    placement = config.placement | dict.fromkeys(roles, FSDP_POOL)
    pools = {**config.resource_pool, FSDP_POOL: [size]}
    used = {name: pools[name] for name in pools if name in placement.values()}
    rollout = config.rollout.model_copy(update={"engine": "transformers"})
    more = {"placement": placement, "resource_pool": used, "rollout": rollout}
    return config.model_copy(update={**sections, **more})


def run_config(
    lm: Path, scored: Path, architecture: ArchitectureConfig, layout: dict[str, Any] | None = None,
    pool: int = 1, optimizer: OptimizerConfig | None = None, **sections: Any,
) -> RunConfig:  # fmt: skip
    """Return a configuration with all four roles on one pool `main` in the same layout.

    lm, scored: folders of a language model and of a model with a score head
    layout:     keys of RoleConfig for every role
    pool:       number of devices
    sections:   further keys, by name of the section
    """
    role = {"model": "test", "architecture": architecture, **(layout or {})}
    training = {
        "train_iters": 1, "global_batch_size": 4, "seq_length": 64, "run_name": "test",
        "tokenizer_name_or_path": "unused", "output_dir": "unused",
    }  # fmt: skip
    learn = (optimizer or OptimizerConfig(lr=1e-3)).model_dump()
    lengths = {"max_prompt_length": 32, "max_new_tokens": MAX_NEW_TOKENS}
    actor = {**lengths, **sections.get("actor_rollout", {})}
    return RunConfig(
        name="test",
        training=TrainingConfig(**{**training, **sections.get("training", {})}),
        algorithm=AlgorithmConfig(**sections.get("algorithm", {})),
        actor_rollout=ActorConfig(**{**role, "load": str(lm), **learn, **actor}),
        ref=RefConfig(**{**role, "load": str(lm), **sections.get("ref", {})}),
        critic=CriticConfig(**{**role, "load": str(scored), **learn, **sections.get("critic", {})}),
        reward=RewardConfig(
            **{"kind": RewardKind.MODEL, **role, "load": str(scored), **sections.get("reward", {})}
        ),
        placement=dict.fromkeys(CONFIGURED, "main"),
        resource_pool={"main": [pool]},
        data=DataConfig(**{"train_files": "unused", **sections.get("data", {})}),
        device=DeviceConfig(kind=DeviceKind.CPU),
        runtime=RuntimeConfig(kind="ray"),
        **{k: v for k, v in sections.items() if k in ("validation", "logging")},
    )
