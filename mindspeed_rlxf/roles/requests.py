"""Make an engine's requests from a batch of prompts, and padded rows from its results."""

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
    """Return the settings of generation by the actor's keys.

    do_sample: False = greedy, whatever the actor's key says
    stop:      texts that end a response; None = none
    """
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
    """Return `settings` with do_sample, temperature, top_k and top_p of the validation section."""
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
    """Return a request with `settings` and `seed` for each prompt, in order; `place` is its row."""
    samples = zip(prompts.sample_ids, prompts.token_ids, strict=True)
    return [
        GenerationRequest(place, sample_id, prompt, settings, seed)
        for place, (sample_id, prompt) in enumerate(samples)
    ]


def gather_rollouts(prompts: Prompts, results: Iterable[GenerationResult]) -> Rollouts:
    """Consume all results; return the padded rows of a batch, in the order of its prompts.

    results: one for each prompt, in any order, else AssertionError
    """
    by_place = {result.place: result for result in results}
    assert by_place.keys() == set(range(prompts.num_rows)), "one result for each prompt"
    ordered = [by_place[place] for place in range(prompts.num_rows)]
    mask = _pad([torch.ones(len(result.tokens)) for result in ordered], torch.bool)
    stopped = [result.finish_reason is FinishReason.STOP for result in ordered]
    versions = [torch.full((len(r.tokens),), r.weights_version) for r in ordered]
    return Rollouts(
        sample_ids=prompts.sample_ids,
        prompt_ids=_pad([torch.from_numpy(ids) for ids in prompts.token_ids]),
        prompt_lengths=torch.tensor([len(ids) for ids in prompts.token_ids], dtype=torch.long),
        response_ids=_pad([torch.tensor(result.tokens) for result in ordered]),
        response_mask=mask,
        trained_mask=mask,
        has_eos=torch.tensor(stopped, dtype=torch.bool),
        rollout_log_probs=_pad([torch.tensor(r.log_probs) for r in ordered], torch.float32),
        ground_truths=prompts.ground_truths,
        data_sources=prompts.data_sources,
        weights_version=_pad(versions, torch.int32),
        extra_infos=prompts.extra_infos,
    )


def version_span(rollouts: Rollouts, row: int) -> tuple[int, int]:
    """Return (smallest, largest) weights version over the tokens of a row's response.

    Raises RuntimeError for a response without tokens.
    """
    versions = rollouts.weights_version[row, : rollouts.response_lengths[row]]
    return int(versions.min()), int(versions.max())


def _pad(rows: list[Tensor], dtype: torch.dtype = torch.long) -> Tensor:
    if not rows:
        return torch.zeros(0, 0, dtype=dtype)
    return pad_sequence(rows, batch_first=True).to(dtype)
