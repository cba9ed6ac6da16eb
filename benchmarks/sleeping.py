"""Engines and roles of `ahead_speed.py`: devices that sleep, and responses of forced lengths.

A plugin of a run calls `sleep` or `force_lengths` in the driver and in each worker.
"""

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from mindspeed_rlxf.config.enums import Role
from mindspeed_rlxf.data.batch import LogProbs
from mindspeed_rlxf.roles import engines, own_roles
from mindspeed_rlxf.roles.drawn_samples import DrawnSamples
from mindspeed_rlxf.roles.rollout import RolloutRole
from mindspeed_rlxf.rollout.rollout_engine import (
    Begun,
    FinishReason,
    GenerationRequest,
    GenerationResult,
    GenerationStats,
    StepwiseEngine,
)

# Ten times those of tests/virtual_roles.py.
STEP_S, ROW_S = 0.2, 0.001  # seconds per decode step, and per row of it
PREFILL_TOKENS_PER_S = 1500.0
TOKEN = 5  # all that is ever sampled


@dataclass
class Decoding:
    """A response in the batch of an engine; `drawn` counts what it has drawn."""

    request: GenerationRequest
    length: int
    version: int
    drawn: int = 0

    @property
    def begun(self) -> Begun:
        """All that is sampled of the response."""
        before = self.request.begun or Begun([], [], [])
        return Begun(
            [*before.tokens, *[TOKEN] * self.drawn],
            [*before.log_probs, *[-1.0] * self.drawn],
            [*before.versions, *[self.version] * self.drawn],
        )

    @property
    def left(self) -> int:
        """Tokens that are missing."""
        before = len(self.request.begun.tokens) if self.request.begun else 0
        return self.length - before - self.drawn


@dataclass
class SleepingEngine(StepwiseEngine):
    """Sleeps for the steps of its rows; sample i gets `lengths[i % len(lengths)]` tokens."""

    real: StepwiseEngine  # has the weights, and generates nothing
    lengths: Sequence[int]
    queue: list[GenerationRequest] = field(default_factory=list)
    batch: list[Decoding] = field(default_factory=list)
    counts: GenerationStats = field(default_factory=GenerationStats)

    def update_weights(self, tensors: Any, version: int) -> None:
        self.real.update_weights(tensors, version)

    def wake(self) -> None:
        self.real.wake()

    def sleep(self) -> None:
        self.real.sleep()

    def score(self, prompts: Any, responses: Any, temperature: float = 1.0) -> list[list[float]]:
        return [[-1.0] * len(response) for response in responses]

    def stats(self) -> GenerationStats:
        return self.counts

    @property
    def weights_version(self) -> int:
        return self.real.weights_version

    def generate(self, requests: Sequence[GenerationRequest]) -> Iterator[GenerationResult]:
        self.add(requests)
        return self.advance(None)

    def add(self, requests: Sequence[GenerationRequest]) -> None:
        self.queue += requests

    def withdraw(self) -> list[GenerationRequest]:
        begun = [replace(row.request, begun=row.begun) for row in self.batch if row.drawn]
        fresh = [row.request for row in self.batch if not row.drawn]
        unfinished = [*begun, *fresh, *self.queue]
        self.batch, self.queue = [], []
        return sorted(unfinished, key=lambda request: request.place)

    def advance(self, steps: int | None) -> Iterator[GenerationResult]:
        self.counts = GenerationStats()
        while self.queue or self.batch:
            self._admit()
            count = min(row.left for row in self.batch)
            if steps is not None:
                count = min(count, steps)
                steps -= count
            time.sleep(count * (STEP_S + ROW_S * len(self.batch)))
            self.counts.sampled_tokens += count * len(self.batch)
            for row in self.batch:
                row.drawn += count
            ended = [row for row in self.batch if not row.left]
            self.batch = [row for row in self.batch if row.left]
            for row in ended:
                begun, place = row.begun, row.request.place
                columns = begun.tokens, begun.log_probs, FinishReason.LENGTH
                yield GenerationResult(place, *columns, row.version, begun.versions)
            if steps == 0:
                return

    def _admit(self) -> None:
        """Begin all that waits; what goes on is prefilled."""
        for request in self.queue:
            if request.begun:
                tokens = len(request.prompt) + len(request.begun.tokens)
                time.sleep(tokens / PREFILL_TOKENS_PER_S)
            length = self.lengths[request.sample_id % len(self.lengths)]
            self.batch.append(Decoding(request, length, self.weights_version))
        self.queue = []


class SleepingRollout(RolloutRole):
    """Gets the weights of the actor, and sleeps instead of generating."""

    lengths: Sequence[int] = ()

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        engine = SleepingEngine(self.replica.engine, self.lengths)
        self.replica = replace(self.replica, engine=engine)


def sleep(lengths: Sequence[int], update_s: float) -> None:
    """Register the rollout role and the training engine `sleeping`, whose update takes so long."""
    SleepingRollout.lengths = lengths
    own_roles.register_role(Role.ROLLOUT)(SleepingRollout)

    def train_step(*_: Any) -> dict[str, float]:
        time.sleep(update_s)
        return {"grad_norm": 1.0, "pg_loss": 0.0}

    def make_engine(config: Any, role: Role) -> Any:
        engine: Any = engines.megatron_engine(config, role)
        engine.train_step = train_step
        engine.log_probs = lambda rollouts, _: LogProbs(torch.zeros(rollouts.response_ids.shape))
        return engine

    engines.register_train_engine("sleeping")(make_engine)


def force_lengths(lengths: Sequence[int]) -> None:
    """Give sample i `lengths[i % len(lengths)]` tokens, whatever engine generates them."""
    add = DrawnSamples.add

    def add_with_lengths(
        self: Any, prompts: Any, sampling: Any, settings: Any, seed: int, _agents: None
    ) -> None:
        for row, sample_id in enumerate(prompts.sample_ids):
            length = lengths[sample_id % len(lengths)]
            forced = replace(settings, min_new_tokens=length, max_new_tokens=length)
            add(self, prompts.select([row]), sampling, forced, seed)

    DrawnSamples.add = add_with_lengths  # type: ignore[method-assign]
