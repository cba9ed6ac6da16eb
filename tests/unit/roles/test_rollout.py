"""The rollout role, with an engine that returns prepared responses."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from mindspeed_rlxf.config.schema import ActorConfig, ValidationConfig
from mindspeed_rlxf.roles import rollout as module
from mindspeed_rlxf.roles.rollout import RolloutRole
from mindspeed_rlxf.rollout import replica as replicas
from mindspeed_rlxf.rollout.rollout_engine import (
    FinishReason,
    GenerationRequest,
    GenerationResult,
    GenerationStats,
)
from tests.unit.roles.test_generation import PROMPTS


class Scripted:
    """Results come in the opposite order; every token is 7, and given ones score -1 each.

    A transfer of weights takes 4 s, a wake 1 s, by a clock of its own.
    """

    def __init__(self) -> None:
        self.weights_version, self.clock = -1, 100.0
        self.calls: list[str] = []

    def take_weights(self, version: int) -> None:
        self.clock += 4.0
        self.weights_version = version

    def wake(self) -> None:
        self.clock += 1.0
        self.calls.append("wake")

    def sleep(self) -> None:
        self.calls.append("sleep")

    def generate(self, requests: Sequence[GenerationRequest]) -> Iterator[GenerationResult]:
        self.calls.append("generate")
        self.clock += 20.0
        for request in reversed(requests):
            if request.sample_id < 0:
                raise ValueError("no such sample")
            reason, version = FinishReason.LENGTH, self.weights_version
            yield GenerationResult(request.place, [7], [-0.5], reason, version)

    def score(self, prompts: Any, responses: Any, temperature: float) -> list[list[float]]:
        self.calls.append("score")
        return [[-1.0] * len(response) for response in responses]

    def stats(self) -> GenerationStats:
        return GenerationStats(prompt_tokens=6)


def make(monkeypatch: pytest.MonkeyPatch, is_leader: bool = True) -> tuple[RolloutRole, Scripted]:
    engine: Any = Scripted()
    replica = replicas.Replica(engine, engine.take_weights, is_leader)
    monkeypatch.setattr(replicas, "build_replica", lambda config, trained: replica)
    monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: engine.clock))
    config: Any = SimpleNamespace(
        actor_rollout=ActorConfig.model_construct(max_new_tokens=1), validation=ValidationConfig()
    )
    return RolloutRole(config, [7]), engine


def test_weights_are_taken_apart_from_generation_and_their_time_is_reported(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    role, engine = make(monkeypatch)
    role.update_weights(3)
    assert engine.calls == [] and engine.weights_version == 3
    first, second = role.generate(PROMPTS, 1), role.generate(PROMPTS, 1)
    rows: Any = first.rows
    assert rows.weights_version.tolist() == [[3]] * 3 and rows.sample_ids == PROMPTS.sample_ids
    assert engine.calls == ["wake", "generate", "sleep"] * 2
    report = first.report
    assert (report.sync_s, second.report.sync_s) == (5.0, 1.0)
    assert (report.sample_ids, report.response_lengths) == (PROMPTS.sample_ids, [1, 1, 1])
    assert report.prompt_tokens == 6


def test_given_responses_take_the_place_of_generated_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    role, engine = make(monkeypatch)
    rows: Any = role.generate(replace(PROMPTS, responses=[[5, 7], [6], [7]]), 1).rows
    assert engine.calls == ["wake", "score", "sleep"]
    assert rows.response_ids.tolist() == [[5, 7], [6, 0], [7, 0]]
    assert rows.has_eos.tolist() == [True, False, True]


def test_an_engine_sleeps_after_a_failure_and_its_leader_alone_returns_rows(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    role, engine = make(monkeypatch, is_leader=False)
    output = role.generate(PROMPTS, 1)
    assert output.rows is None and output.report is None
    with pytest.raises(ValueError, match="no such sample"):
        role.generate(replace(PROMPTS, sample_ids=[40, -1, 42]), 1)
    assert engine.calls == ["wake", "generate", "sleep"] * 2
