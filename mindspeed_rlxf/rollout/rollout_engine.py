"""Rollout engine interface and registry: requests in, results as they finish.

An engine holds one replica's policy weights. All replica ranks make the same calls with the same
arguments, and take the same number of results from `generate` and `advance`.

An engine may stop in the middle of responses, after a given number of decode steps, and go on later
(`StepwiseEngine`), or only generate whole responses (`RolloutEngine`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Protocol, TypeAlias

import numpy as np
from torch import Tensor

from mindspeed_rlxf.config.registry import add_to
from mindspeed_rlxf.config.schema import RunConfig
from mindspeed_rlxf.engine.train_engine import TrainEngine
from mindspeed_rlxf.rollout.sampling import SamplingSettings


class EngineLost(RuntimeError):
    """An engine's server has failed, and no other takes its place; the same command goes on."""


class FinishReason(str, Enum):
    """Why a response ended."""

    STOP = "stop"  # its last token is an EOS, or completes a stop string
    LENGTH = "length"  # it has `max_new_tokens` tokens

    @classmethod
    def of(cls, tokens: Sequence[int], settings: SamplingSettings) -> FinishReason:
        """Return STOP if an EOS or a stop string ends the tokens, else LENGTH."""
        return cls.STOP if settings.ends_with(tokens) else cls.LENGTH


@dataclass(frozen=True)
class Begun:
    """The tokens of a response that were sampled before, at least one; a part that goes on.

    Attributes:
        tokens: Token ids.
        log_probs: One per token.
        versions: Weights version of each token.
    """

    tokens: list[int]
    log_probs: list[float]
    versions: list[int]


@dataclass(frozen=True, eq=False)
class GenerationRequest:
    """Request for one response, or for the rest of one.

    Example: sample 70 has the tokens 5 and 6, sampled after 3 and 4 updates, and goes on:

        GenerationRequest(0, 70, prompt, settings, seed, Begun([5, 6], [-0.5, -0.1], [3, 4]))

    Attributes:
        place: Index chosen by the caller and repeated by the result; unique among the requests that
            are unfinished.
        sample_id: With `seed` it determines every random number, whatever else is in the batch.
        prompt: [prompt] int64, without padding.
        begun: The response so far; None = nothing.
        turn_start: Tokens of the response before the turn that is sampled, where an agent leads a
            conversation; they are in `begun`, or at the end of `prompt`. Stop strings and
            `min_new_tokens` see the turn alone, random numbers and `max_new_tokens` the response.
        is_turn: Whether the result may be followed by a request with more tokens behind it, for
            which an engine may keep what it has computed.
    """

    place: int
    sample_id: int
    prompt: np.ndarray
    settings: SamplingSettings
    seed: int
    begun: Begun | None = None
    turn_start: int = 0
    is_turn: bool = False


@dataclass(frozen=True)
class GenerationResult:
    """One finished response.

    Attributes:
        tokens: Response token ids, EOS included.
        log_probs: One per token, at the request's temperature, before top-k and top-p.
        weights_version: Number of actor updates in the weights that sampled the last token.
        versions: That of each token; None = `weights_version` for all (see `token_versions`).
        trained: Whether each token was sampled, and is trained; None = all (see `token_trained`).
    """

    place: int
    tokens: list[int]
    log_probs: list[float]
    finish_reason: FinishReason
    weights_version: int
    versions: list[int] | None = None
    trained: list[bool] | None = None

    @property
    def token_trained(self) -> list[bool]:
        """Whether each token is trained."""
        return [True] * len(self.tokens) if self.trained is None else self.trained

    @property
    def token_versions(self) -> list[int]:
        """Weights version of each token."""
        if self.versions is None:
            return [self.weights_version] * len(self.tokens)
        return self.versions


@dataclass
class GenerationStats:
    """Counts since the last `generate`, `advance` or `score` began."""

    prompt_tokens: int = 0  # tokens computed in prefills, and in `score`
    decoded_tokens: int = 0  # response tokens drawn in decode steps
    sampled_tokens: int = 0  # response tokens drawn
    idle_passes: int = 0  # passes for other ranks' tokens after this rank had finished

    def __add__(self, other: GenerationStats) -> GenerationStats:
        """Return the counts of both."""
        return GenerationStats(
            self.prompt_tokens + other.prompt_tokens,
            self.decoded_tokens + other.decoded_tokens,
            self.sampled_tokens + other.sampled_tokens,
            self.idle_passes + other.idle_passes,
        )


class RolloutEngine(Protocol):
    """This rank's part in one replica of the generating policy; generates whole responses."""

    def update_weights(self, tensors: Iterable[tuple[str, Tensor]], version: int) -> None:
        """Replace all weights, or after the first time those that training changes.

        Where adapters are trained (`actor_rollout.lora`), the first call brings the model and each
        adapter's A and B, as PEFT names them; later ones may bring the adapters alone. An engine
        computes W x + alpha / rank * B (A x): in W + B A, rounded to bf16, a small update is lost.

        Args:
            tensors: Each Hugging Face tensor once, with its name, in any order.
            version: Number of actor updates in them.

        Raises:
            ValueError: A tensor is missing, unknown or sent twice, or has another shape.
        """

    def wake(self) -> None:
        """Prepare to generate: move the weights to the device."""

    def sleep(self) -> None:
        """Free the device memory only generation needs: weight copies, the KV cache."""

    def generate(self, requests: Sequence[GenerationRequest]) -> Iterator[GenerationResult]:
        """Yield one result for each request as soon as its response ends, in no fixed order.

        The engine must be awake until the last result has been taken. Ranks that share experts
        (expert parallelism) wait for one another: all must call it, even without requests, and take
        all results, or close the iterator after the first or a later one.
        """

    def score(
        self,
        prompts: Sequence[np.ndarray],
        responses: Sequence[Sequence[int]],
        temperature: float = 1.0,
    ) -> list[list[float]]:
        """Return the log-probs that generation would report for each response's tokens.

        The engine must be awake. Ranks that share experts must all call it, even without responses.

        Args:
            prompts: One for each response, [prompt] int64 each.
            responses: Token ids, at least one each.
            temperature: Divides the logits.
        """

    def stats(self) -> GenerationStats:
        """Return the counts for the current or last `generate`, `advance` or `score`."""

    @property
    def weights_version(self) -> int:
        """Version of the loaded weights, as given to `update_weights`."""


class StepwiseEngine(RolloutEngine, Protocol):
    """An engine whose requests outlive calls, so that generation stops and goes on.

    `generate` is `add` and `advance(None)`, while nothing else is unfinished. Weights change, and
    the engine sleeps, only while nothing is unfinished; `withdraw` sees to that.
    """

    def add(self, requests: Sequence[GenerationRequest]) -> None:
        """Append requests to the queue; computes nothing."""

    def advance(self, steps: int | None) -> Iterator[GenerationResult]:
        """Generate for at most `steps` decode steps; yield responses as they end.

        Prefills are no steps. The rest stays unfinished, with its cache. None = until nothing is
        left. The engine must be awake. Ranks that share experts must all call it with the same
        `steps`, even with nothing to do, and take all results.
        """

    def withdraw(self) -> list[GenerationRequest]:
        """Return all unfinished requests in the order of `add`, with what was sampled in `begun`.

        The engine forgets them: their cache, and everything computed for them, is freed.
        """


def answer_from_table(
    engine: RolloutEngine,
    responses: Mapping[int, Sequence[int]],
    requests: Sequence[GenerationRequest],
) -> Iterator[GenerationResult]:
    """Yield each request's given response as a result, to compare or replay runs.

    `responses` maps sample ids to token ids, EOS included, at least one. The engine computes all
    log-probs before the first result, so all requests must have one temperature.

    Raises:
        KeyError: A sample has no response.
    """
    given = [list(responses[request.sample_id]) for request in requests]
    temperatures = {request.settings.logit_temperature for request in requests}
    assert len(temperatures) <= 1, f"one temperature for all of a batch, not {temperatures}"
    scored = engine.score([request.prompt for request in requests], given, *temperatures)
    for request, tokens, log_probs in zip(requests, given, scored, strict=True):
        reason = FinishReason.of(tokens, request.settings)
        yield GenerationResult(request.place, tokens, log_probs, reason, engine.weights_version)


NATIVE = "native"
"""Name of the package's own engine, which generates with the Megatron model itself."""

TRANSFORMERS = "transformers"
"""Name of the engine in `hf_rollout`, which generates with the model that transformers has."""

VLLM = "vllm"
"""Name of the engine in `rollout.vllm`, which generates in vLLM servers."""

EngineFactory: TypeAlias = Callable[[RunConfig, TrainEngine], RolloutEngine]
"""(configuration, the actor's training engine in the same process) -> the engine of this rank.

The new engine has no weights yet. Before the first generation its `update_weights` gets all of
them: whole tensors, on the actor's device, with adapters beside them. All ranks of a
tensor-parallel group make the same calls on their engines; only the results of the first rank are
used.
"""

ENGINES: dict[str, EngineFactory] = {}
"""Factories of the engines of plugins, by name."""


def register_rollout_engine(name: str) -> Callable[[EngineFactory], EngineFactory]:
    """Return a decorator that adds an engine class, or a function that makes one, to `ENGINES`.

    The decorator returns its argument unchanged, and raises ValueError for a taken name, those of
    the package included.
    """

    def register(factory: EngineFactory) -> EngineFactory:
        if name in (NATIVE, TRANSFORMERS, VLLM):
            raise ValueError(f"rollout engine {name!r} is the package's own; choose another name")
        return add_to(ENGINES, name, "rollout engine")(factory)

    return register
