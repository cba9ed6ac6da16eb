"""Artificial rollouts and experience, with responses of very different lengths."""

from collections.abc import Iterator

import torch
from torch import Tensor

from mindspeed_rlxf.data.batch import Experience, Rollouts
from tests.distributed.llamas import VOCAB
from tests.rows import length_mask, made_rollouts

PROMPT_LENGTHS = (3, 11, 1, 7, 5, 2, 9, 4)
RESPONSE_LENGTHS = (16, 1, 9, 2, 5, 13, 1, 7)


def make_rollouts(seed: int = 0) -> Rollouts:
    """Return eight samples of random tokens with responses of 1 to 16 tokens."""
    generator = torch.Generator().manual_seed(seed)
    prompts, responses = torch.tensor(PROMPT_LENGTHS), torch.tensor(RESPONSE_LENGTHS)
    count = len(prompts)

    def tokens(lengths: torch.Tensor) -> torch.Tensor:
        width = int(lengths.max())
        ids = torch.randint(0, VOCAB, (count, width), generator=generator)
        return ids * length_mask(lengths, width)

    return made_rollouts(
        prompt_ids=tokens(prompts),
        prompt_lengths=prompts,
        response_ids=tokens(responses),
        response_mask=length_mask(responses, int(responses.max())),
        has_eos=torch.tensor([False, True] * (count // 2)),
        data_sources=["test"] * count,
    )


def sequences(rollouts: Rollouts) -> Iterator[tuple[Tensor, Tensor]]:
    """The token ids of each prompt and response, without padding."""
    for row in range(rollouts.num_rows):
        prompt = rollouts.prompt_ids[row, : rollouts.prompt_lengths[row]]
        yield prompt, rollouts.response_ids[row, : rollouts.response_lengths[row]]


def make_experience(rollouts: Rollouts, seed: int = 1) -> Experience:
    """Return random advantages, returns and values; old log-probs near those of a random model."""
    generator = torch.Generator().manual_seed(seed)
    count, width = rollouts.response_ids.shape
    mask = rollouts.trained_mask
    slots = rollouts.response_lengths + rollouts.has_eos.long()
    value_mask = length_mask(slots, width + 1)

    def noise(columns: int) -> torch.Tensor:
        return torch.randn(count, columns, generator=generator)

    return Experience(
        advantages=noise(width) * mask,
        trained_mask=mask,
        old_log_probs=(noise(width) * 0.3 - 3.6) * mask,
        ref_log_probs=torch.zeros(count, 0),
        returns=noise(width + 1) * value_mask,
        values=noise(width + 1) * value_mask,
        value_mask=value_mask,
    )
