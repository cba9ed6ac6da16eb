"""Requests for a rollout engine made of prompts, and rows made of its results."""

from collections.abc import Iterable, Sequence
from dataclasses import replace

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from mindspeed_rlxf.config.schema import ActorConfig, ValidationConfig
from mindspeed_rlxf.data.batch import Prompts, Rollouts
from mindspeed_rlxf.rollout.rollout_engine import (
    FinishReason,
    GenerationRequest,
    GenerationResult,
)
from mindspeed_rlxf.rollout.sampling import SamplingSettings, StopStrings


def sampling_settings(
    actor: ActorConfig,
    eos_token_ids: Sequence[int],
    do_sample: bool,
    stop: StopStrings | None = None,
) -> SamplingSettings:
    """Return settings from the actor's keys; do_sample False means greedy, whatever they say."""
    return SamplingSettings(
        do_sample=do_sample,
        temperature=actor.temperature,
        top_k=actor.top_k,
        top_p=actor.top_p,
        min_new_tokens=actor.min_new_tokens,
        max_new_tokens=actor.max_new_tokens,
        eos_token_ids=tuple(eos_token_ids),
        stop=stop,
    )


def validation_settings(
    validation: ValidationConfig, settings: SamplingSettings
) -> SamplingSettings:
    """Return `settings` with the validation section's sampling keys."""
    return replace(
        settings,
        do_sample=validation.do_sample,
        temperature=validation.temperature,
        top_k=validation.top_k,
        top_p=validation.top_p,
    )


def make_requests(
    prompts: Prompts, settings: SamplingSettings, seed: int
) -> list[GenerationRequest]:
    """Return a request for each prompt, in order; `place` is its row."""
    samples = zip(prompts.sample_ids, prompts.token_ids, strict=True)
    return [
        GenerationRequest(place, sample_id, prompt, settings, seed)
        for place, (sample_id, prompt) in enumerate(samples)
    ]


def gather_rollouts(prompts: Prompts, results: Iterable[GenerationResult]) -> Rollouts:
    """Consume all results; return padded rows in prompt order.

    `results` must hold one for each prompt, in any order.
    """
    by_place = {result.place: result for result in results}
    assert by_place.keys() == set(range(prompts.num_rows)), "one result for each prompt"
    ordered = [by_place[place] for place in range(prompts.num_rows)]
    mask = _pad([torch.ones(len(result.tokens)) for result in ordered], torch.bool)
    trained = mask  # one tensor, where everything was sampled
    if any(result.trained is not None for result in ordered):
        trained = _pad([torch.tensor(result.token_trained) for result in ordered], torch.bool)
    stopped = [result.finish_reason is FinishReason.STOP for result in ordered]
    versions = [torch.tensor(result.token_versions) for result in ordered]
    return Rollouts(
        sample_ids=prompts.sample_ids,
        prompt_ids=_pad([torch.from_numpy(ids) for ids in prompts.token_ids]),
        prompt_lengths=torch.tensor([len(ids) for ids in prompts.token_ids], dtype=torch.long),
        response_ids=_pad([torch.tensor(result.tokens) for result in ordered]),
        response_mask=mask,
        trained_mask=trained,
        has_eos=torch.tensor(stopped, dtype=torch.bool),
        rollout_log_probs=_pad([torch.tensor(r.log_probs) for r in ordered], torch.float32),
        ground_truths=prompts.ground_truths,
        data_sources=prompts.data_sources,
        weights_version=_pad(versions, torch.int32),
        extra_infos=prompts.extra_infos,
        messages=prompts.messages,
    )


def _pad(rows: list[Tensor], dtype: torch.dtype = torch.long) -> Tensor:
    if not rows:
        return torch.zeros(0, 0, dtype=dtype)
    return pad_sequence(rows, batch_first=True).to(dtype)
