"""The interface of rollout engines: requests go in, results come out as they finish.

An engine holds the policy's weights of one replica. All ranks of a replica make the same calls with
the same arguments, and take the same number of results from `generate`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Protocol

import numpy as np
from torch import Tensor

from mindspeed_rlxf.rollout.sampling import SamplingSettings


class FinishReason(str, Enum):
    """The reason for the end of a response."""

    STOP = "stop"  # its last token is an EOS, or completes a stop string
    LENGTH = "length"  # it has `max_new_tokens` tokens

    @classmethod
    def of(cls, tokens: Sequence[int], settings: SamplingSettings) -> FinishReason:
        """Return STOP where an EOS or a stop string ends the tokens, else LENGTH.

        tokens: of the whole response, at least one
        """
        return cls.STOP if settings.ends_with(tokens) else cls.LENGTH


@dataclass(frozen=True, eq=False)
class GenerationRequest:
    """The request of one response.

    place:     index of the sample in the caller's batch; the result repeats it
    sample_id: determines every sampled token together with `seed`, whatever else is in the batch
    prompt:    [prompt] int64, without padding
    """

    place: int
    sample_id: int
    prompt: np.ndarray
    settings: SamplingSettings
    seed: int


@dataclass(frozen=True)
class GenerationResult:
    """One finished response.

    tokens:          EOS included
    log_probs:       one per token, unfiltered, at the temperature of the request
    weights_version: number of actor updates in the weights
    """

    place: int
    tokens: list[int]
    log_probs: list[float]
    finish_reason: FinishReason
    weights_version: int


@dataclass
class GenerationStats:
    """Counts of computed and produced tokens since the last `generate` or `score` began."""

    prompt_tokens: int = 0  # prompt tokens run through the model
    decoded_tokens: int = 0  # response tokens run through the model
    sampled_tokens: int = 0  # next-token choices made: each is a token of a response
    idle_passes: int = 0  # passes of other ranks that needed this one's experts after its own


class RolloutEngine(Protocol):
    """One replica of the policy that generates."""

    def update_weights(self, tensors: Iterable[tuple[str, Tensor]], version: int) -> None:
        """Replace all weights.

        tensors: each Hugging Face tensor of the model once, with its name, in any order
        version: number of actor updates in them
        Raises ValueError for a tensor that is missing or unknown, or has another shape.
        """

    def wake(self) -> None:
        """Prepare to generate: move the weights to the device."""

    def sleep(self) -> None:
        """Free the memory that only generation needs: copies of weights, the KV cache."""

    def generate(self, requests: Sequence[GenerationRequest]) -> Iterator[GenerationResult]:
        """Yield one result for each request as soon as its response ends, in no fixed order.

        The engine must be awake until the last result has been taken. Ranks that share experts
        need one another: take all results, or close the iterator after some.
        """

    def score(
        self,
        prompts: Sequence[np.ndarray],
        responses: Sequence[Sequence[int]],
        temperature: float = 1.0,
    ) -> list[list[float]]:
        """Return a list for each response: the log-probs that generation would report for it.

        temperature: divides the logits
        """

    def stats(self) -> GenerationStats: ...

    @property
    def weights_version(self) -> int:
        """The version of the loaded weights."""
