"""Count the floating-point operations that the models of an iteration need."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeAlias

import numpy as np

from mindspeed_rlxf.config.enums import OldLogProbs, RewardKind, Role
from mindspeed_rlxf.config.schema import RunConfig
from mindspeed_rlxf.data.mini_batches import sample_flops
from mindspeed_rlxf.roles.reports import GenerateReport, ResponseLengths

FindPeak: TypeAlias = Callable[[str], float | None]
"""Function: name of a device -> bf16 operations per second of its data sheet, None if unknown."""

FORWARD, TRAIN = 1, 3  # passes: a backward pass counts as two


def iteration_flops(
    config: RunConfig,
    generated: Sequence[GenerateReport],
    learnt: ResponseLengths,
    updates_actor: bool = True,
) -> float:
    """Return the floating-point operations of all passes over the samples of an iteration.

    A pass is forward; an epoch of an update counts as three, since backward counts as two.
    generated:     reports on all responses: a pass of the actor, and of a Megatron reward model
    learnt:        lengths of the kept samples: a pass of reference, of critic, and of the actor if
                   its log-probs are recomputed; then the epochs of actor and critic
    updates_actor: whether the actor is updated
    Model FLOPs (arXiv:2204.02311, appendix B): recomputed activations do not count. Neither do a
    Hugging Face classifier and the actor's pass that `kl_penalty: full` needs.
    """
    prompts = [n for report in generated for n in report.prompt_lengths]
    responses = [n for report in generated for n in report.response_lengths]
    total = _forward_flops(config, Role.ACTOR_ROLLOUT, prompts, responses)
    if config.reward.kind is RewardKind.MODEL:
        total += _forward_flops(config, Role.REWARD, prompts, responses)
    passes = {Role.ACTOR_ROLLOUT: updates_actor * TRAIN * config.actor_rollout.ppo_epochs}
    if config.old_log_probs is OldLogProbs.RECOMPUTE:
        passes[Role.ACTOR_ROLLOUT] += FORWARD
    if Role.REF in config.roles:
        passes[Role.REF] = FORWARD
    if config.critic is not None:
        passes[Role.CRITIC] = FORWARD + TRAIN * config.critic.critic_update_epochs
    rows = learnt.prompts, learnt.responses
    return total + sum(
        number * _forward_flops(config, role, *rows) for role, number in passes.items()
    )


def _forward_flops(
    config: RunConfig, role: Role, prompts: Sequence[int], responses: Sequence[int]
) -> float:
    """Return the operations of one forward pass of a role over all samples of these lengths.

    prompts, responses: tokens of each sample. The output layer counts for responses only, and not
    at all for critic and reward, whose heads are negligible.
    """
    architecture = config.role(role).architecture
    assert architecture is not None, f"{role.value} has a model"
    outputs = np.asarray(responses, dtype=np.float64)
    tokens = outputs + np.asarray(prompts, dtype=np.float64)
    if role in (Role.CRITIC, Role.REWARD):
        outputs = 0.0 * outputs
    return float(np.sum(sample_flops(architecture, tokens, outputs)))  # type: ignore[arg-type]
