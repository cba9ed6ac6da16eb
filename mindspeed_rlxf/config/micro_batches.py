"""Choose what a forward pass of a role holds: a number of samples, or of tokens."""

from typing import Any

from mindspeed_rlxf.config.enums import CONFIGURED, LossNormalizer, Role, Stage
from mindspeed_rlxf.config.keys import ROLE_SECTIONS, Tree
from mindspeed_rlxf.config.raw_config import RawConfig
from mindspeed_rlxf.config.resolved_files import read_resolved
from mindspeed_rlxf.config.schema import LearningConfig

TOKENS_PER_MICRO_BATCH = 8192
"""Default of `max_tokens_per_micro_batch`, if no row is longer."""


def set_micro_batches(raw: RawConfig, payload: Tree) -> None:
    """Let roles without a micro-batch size fill each pass with tokens, where that changes nothing.

    Rows must be packed, and the loss no mean of micro-batches, which a plugin's objective may be. A
    pipeline has one sample per pass, since a few large passes leave its stages idle. A run that was
    started with a number of samples per pass, as older versions did by default, goes on so: other
    micro-batches round otherwise.
    """
    training, algorithm = payload["training"], payload["algorithm"]
    seq_length = training.get("seq_length")
    if type(seq_length) is not int:
        return  # pydantic reports it
    averages = algorithm.get("loss_normalizer") == LossNormalizer.MICRO_BATCH_MEAN.value
    averages |= algorithm.get("objective") is not None
    compares_pairs = training.get("stage") == Stage.RAY_ONLINE_DPO.value
    earlier = read_resolved(training)
    for role in CONFIGURED:
        section = payload[role.value] or {}
        if "architecture" not in section or not section.get("packed_sequences", True):
            continue
        if "micro_batch_size" in section or "max_tokens_per_micro_batch" in section:
            continue
        is_trained = issubclass(ROLE_SECTIONS[role], LearningConfig)
        balances_experts = bool(section["architecture"].get("moe_aux_loss_coeff"))
        if is_trained and (averages or balances_experts):
            continue
        if role is Role.ACTOR_ROLLOUT and compares_pairs:
            continue
        if section.get("pipeline_model_parallel_size", 1) != 1:
            continue
        limit = max(seq_length, TOKENS_PER_MICRO_BATCH)
        num_samples = _samples_per_pass(earlier.get(role.value))
        if num_samples is None:
            section["max_tokens_per_micro_batch"] = limit
            continue
        section["micro_batch_size"] = num_samples
        meaning = f"as this run began; max_tokens_per_micro_batch={limit} fills passes with tokens"
        raw.note(meaning, f"{role.value}.micro_batch_size={num_samples}")


def _samples_per_pass(section: Any) -> int | None:
    """Return the samples per pass of a resolved role; None if it counts tokens."""
    if not isinstance(section, dict) or section.get("max_tokens_per_micro_batch") is not None:
        return None
    num_samples = section.get("micro_batch_size")
    return num_samples if type(num_samples) is int else None
