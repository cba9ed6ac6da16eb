"""Responses to prompts with a model that is at hand: what actor and rollout have in common."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from mindspeed_rlxf.config.schema import ActorConfig, RunConfig
from mindspeed_rlxf.data.batch import Prompts, RoleOutput, Rollouts
from mindspeed_rlxf.models.transformer import TransformerModel
from mindspeed_rlxf.roles.reports import GenerateReport
from mindspeed_rlxf.rollout.native import GenerationStats, NativeRollout
from mindspeed_rlxf.rollout.sampling import SamplingSettings


class Generation:
    """How a run samples."""

    def __init__(self, config: RunConfig, eos_token_ids: Sequence[int]) -> None:
        actor, memory_gib = config.actor_rollout, config.device.memory_gib
        self.max_rows = actor.num_samples_per_step
        self.device_memory = int(memory_gib * 2**30) if memory_gib else None
        self.sampling = sampling_settings(actor, eos_token_ids, actor.do_sample)
        self.greedy = sampling_settings(actor, eos_token_ids, False)

    def respond(
        self, model: TransformerModel, prompts: Prompts, seed: int, greedy: bool
    ) -> tuple[Rollouts, GenerationStats]:
        """Responses that are generated, or those that come along with the prompts."""
        settings = self.greedy if greedy else self.sampling
        rollout = NativeRollout(model, settings, self.max_rows, self.device_memory)
        if any(prompts.responses):
            tokens = prompts.responses
            log_probs = rollout.score(prompts.token_ids, tokens)
        else:
            tokens, log_probs = rollout.generate(prompts.token_ids, prompts.sample_ids, seed)
        return _rollouts(prompts, tokens, log_probs, settings), rollout.stats


def sampling_settings(
    actor: ActorConfig, eos_token_ids: Sequence[int], do_sample: bool
) -> SamplingSettings:
    return SamplingSettings(
        do_sample=do_sample,
        temperature=actor.temperature,
        top_k=actor.top_k,
        top_p=actor.top_p,
        min_new_tokens=actor.min_new_tokens,
        max_new_tokens=actor.max_new_tokens,
        eos_token_ids=tuple(eos_token_ids),
    )


def generated(
    prompts: Prompts, rows: Rollouts, stats: GenerationStats, sync_s: float
) -> RoleOutput:
    """What the first rank of a replica returns. sync_s: that it waited for weights."""
    report = GenerateReport(
        sample_ids=prompts.sample_ids,
        data_sources=prompts.data_sources,
        prompt_lengths=rows.prompt_lengths.tolist(),
        response_lengths=rows.response_lengths.tolist(),
        has_eos=rows.has_eos.tolist(),
        prompt_tokens=stats.prompt_tokens,
        decoded_tokens=stats.decoded_tokens,
        sampled_tokens=stats.sampled_tokens,
        sync_s=sync_s,
    )
    return RoleOutput(rows, report)


def _rollouts(
    prompts: Prompts,
    tokens: list[list[int]],
    log_probs: list[list[float]],
    settings: SamplingSettings,
) -> Rollouts:
    mask = _padded([torch.ones(len(t)) for t in tokens], torch.bool)
    return Rollouts(
        sample_ids=prompts.sample_ids,
        prompt_ids=_padded([torch.from_numpy(ids) for ids in prompts.token_ids]),
        prompt_lengths=torch.tensor([len(ids) for ids in prompts.token_ids], dtype=torch.long),
        response_ids=_padded([torch.tensor(t) for t in tokens]),
        response_mask=mask,
        trained_mask=mask,
        has_eos=torch.tensor([t[-1] in settings.eos_token_ids for t in tokens], dtype=torch.bool),
        rollout_log_probs=_padded([torch.tensor(p) for p in log_probs], torch.float32),
        ground_truths=prompts.ground_truths,
        data_sources=prompts.data_sources,
    )


def _padded(rows: list[Tensor], dtype: torch.dtype = torch.long) -> Tensor:
    if not rows:
        return torch.zeros(0, 0, dtype=dtype)
    return pad_sequence(rows, batch_first=True).to(dtype)
