"""The rollout role, with an engine that returns prepared responses."""

from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from mindspeed_rlxf.config.lora import LoraConfig
from mindspeed_rlxf.config.schema import ActorConfig, RolloutConfig, ValidationConfig
from mindspeed_rlxf.data.batch import Prompts
from mindspeed_rlxf.engine import offload
from mindspeed_rlxf.roles import rollout as module
from mindspeed_rlxf.roles.reports import SliceReport
from mindspeed_rlxf.roles.rollout import (
    RolloutGroup,
    RolloutRole,
    gather_rollouts,
    sampling_settings,
    validation_settings,
)
from mindspeed_rlxf.roles.weights_probe import ProbeReport
from mindspeed_rlxf.rollout import replica as replicas
from mindspeed_rlxf.rollout.rollout_engine import (
    FinishReason,
    GenerationRequest,
    GenerationResult,
    GenerationStats,
)
from mindspeed_rlxf.rollout.sampling import SamplingSettings

PROMPTS = Prompts(
    [40, 41, 42], [np.array([1, 2]), np.array([3]), np.array([4, 5, 6])],
    ["a", "b", "c"], ["x", "y", "z"], [[]] * 3, [{"n": i} for i in range(3)],
)  # fmt: skip
RESULTS = [  # as they finish
    GenerationResult(1, [7], [-1.0], FinishReason.STOP, 5),
    GenerationResult(2, [8, 9], [-2.0, -3.0], FinishReason.LENGTH, 5),
    GenerationResult(0, [7, 8, 9], [-4.0, -5.0, -6.0], FinishReason.STOP, 4),
]


class Scripted:
    """Results come in the opposite order; every token is 7, and given ones score -1 each.

    A transfer of weights takes 4 s, a wake 1 s, by a clock of its own.
    """

    def __init__(self) -> None:
        self.weights_version, self.clock = -1, 100.0
        self.calls: list[str] = []

    def take_weights(self, version: int, with_base: bool) -> None:
        with offload.holding():  # a server starts meanwhile
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


def make(
    monkeypatch: pytest.MonkeyPatch, is_leader: bool = True, is_colocated: bool = False
) -> tuple[RolloutRole, Scripted]:
    engine: Any = Scripted()
    replica = replicas.Replica(replicas.in_slices(engine), engine.take_weights, is_leader)
    monkeypatch.setattr(replicas, "build_replica", lambda config, trained, logs: replica)
    monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: engine.clock))
    config: Any = SimpleNamespace(
        actor_rollout=ActorConfig.model_construct(max_new_tokens=1),
        validation=ValidationConfig(),
        rollout=RolloutConfig(),
    )
    actor: Any = SimpleNamespace(engine=None) if is_colocated else None
    return RolloutRole(config, [7], actor), engine


def test_weights_are_taken_apart_from_generation_and_their_time_is_reported(monkeypatch):
    role, engine = make(monkeypatch)
    role.update_weights(3, with_base=True)
    assert engine.calls == [] and engine.weights_version == 3
    first, second = role.generate(PROMPTS, 1), role.generate(PROMPTS, 1)
    rows: Any = first.rows
    assert rows.weights_version.tolist() == [[3]] * 3 and rows.sample_ids == PROMPTS.sample_ids
    assert engine.calls == ["wake", "generate", "generate"]
    report = first.report
    assert (report.sync_s, second.report.sync_s) == (5.0, 0.0)
    assert report.response_lengths == [1, 1, 1]
    assert report.prompt_tokens == 6


def test_given_responses_take_the_place_of_generated_ones(monkeypatch):
    role, engine = make(monkeypatch)
    rows: Any = role.generate(replace(PROMPTS, responses=[[5, 7], [6], [7]]), 1).rows
    assert engine.calls == ["wake", "score"]
    assert rows.response_ids.tolist() == [[5, 7], [6, 0], [7, 0]]
    assert rows.has_eos.tolist() == [True, False, True]


def test_an_engine_sleeps_once_training_needs_the_device(monkeypatch):
    """Also after a failure. A wake and a sleep for each batch would be a copy of all weights."""
    role, engine = make(monkeypatch, is_colocated=True)
    role.generate(PROMPTS, 1)
    with pytest.raises(ValueError, match="no such sample"):
        role.generate(replace(PROMPTS, sample_ids=[40, -1, 42]), 1)
    for _ in range(2):
        with offload.holding():
            pass
    assert engine.calls == ["wake", "generate", "generate", "sleep"]
    role.generate(PROMPTS, 1)
    role.update_weights(2, with_base=True)  # needs the training weights on the device
    role.generate(PROMPTS, 1)
    assert engine.calls[4:] == ["wake", "generate", "sleep", "wake", "generate"]


def test_an_engine_on_devices_of_its_own_never_sleeps(monkeypatch):
    role, engine = make(monkeypatch)
    for version in range(2):
        role.update_weights(version, with_base=True)
        role.generate(PROMPTS, 1)
    assert engine.calls == ["wake", "generate"] * 2, "a wake also checks the server's cache"


def test_the_leader_of_a_replica_alone_returns_rows(monkeypatch):
    role, _ = make(monkeypatch, is_leader=False)
    output = role.generate(PROMPTS, 1)
    assert output.rows is None and output.report is None


def test_rows_stand_in_the_order_of_the_prompts():
    rows = gather_rollouts(PROMPTS, iter(RESULTS))
    assert rows.sample_ids == [40, 41, 42] and rows.ground_truths == ["a", "b", "c"]
    assert rows.extra_infos == [{"n": 0}, {"n": 1}, {"n": 2}]
    assert rows.prompt_ids.tolist() == [[1, 2, 0], [3, 0, 0], [4, 5, 6]]
    assert rows.response_ids.tolist() == [[7, 8, 9], [7, 0, 0], [8, 9, 0]]
    assert rows.response_lengths.tolist() == [3, 1, 2]
    assert rows.has_eos.tolist() == [True, True, False]
    assert rows.rollout_log_probs.tolist() == [[-4.0, -5.0, -6.0], [-1.0, 0, 0], [-2.0, -3.0, 0]]
    assert rows.weights_version.dtype == torch.int32
    assert rows.weights_version.tolist() == [[4, 4, 4], [5, 0, 0], [5, 5, 0]]


def test_every_sampling_key_reaches_generation():
    keys = {
        "temperature": 0.7, "top_k": 5, "top_p": 0.9, "min_new_tokens": 2, "max_new_tokens": 8,
    }  # fmt: skip
    actor: Any = SimpleNamespace(**keys)
    found = sampling_settings(actor, [3, 4], True)
    assert found == SamplingSettings(do_sample=True, eos_token_ids=(3, 4), **keys)
    assert found.logit_temperature == 0.7  # of the log-probs in training too
    assert sampling_settings(actor, [3, 4], False).logit_temperature == 1.0


def test_every_sampling_key_of_validation_reaches_its_generation():
    greedy = SamplingSettings(
        False, 0.7, 5, 0.9, min_new_tokens=2, max_new_tokens=8, eos_token_ids=(3,)
    )
    keys = {"do_sample": True, "temperature": 0.6, "top_k": 9, "top_p": 0.5}
    found = validation_settings(ValidationConfig(**keys), greedy)  # type: ignore[arg-type]
    assert found == SamplingSettings(**keys, min_new_tokens=2, max_new_tokens=8, eos_token_ids=(3,))  # type: ignore[arg-type]
    assert validation_settings(ValidationConfig(), greedy).do_sample is False


def test_replicas_are_counted_without_ranks_beside_leaders(monkeypatch: Any) -> None:
    reports = [[], [{"version": 1}], [], [{"version": 2}], None]
    replies = [SimpleNamespace(report=report) for report in reports]
    made: Any = SimpleNamespace(replies=lambda: replies)
    monkeypatch.setattr(module, "submit_together", lambda *_: made)
    part: Any = SimpleNamespace(prepare=lambda *_: None)
    group = OneReplica()
    group.group, group.pool = part, part
    group.run = SimpleNamespace(train_rollout_split=None, runs_vllm=True)
    group.run.actor_rollout = SimpleNamespace(lora=LoraConfig())
    assert RolloutGroup._send(group, part, 1) == [(0, {"version": 1}), (1, {"version": 2})]


RESTARTED = 9  # tensors that changed in an update after which a restart is reported


class OneReplica(RolloutGroup):
    """A group whose server reports these receipts, one for each update."""

    def __init__(self, *changed: int | None) -> None:
        actor: Any = SimpleNamespace(bf16=False)
        self.run: Any = SimpleNamespace(runs_vllm=False, actor_rollout=actor)
        self._version, self.moved, self._has_base = None, False, False
        self.server_has_failed = False
        self.lines: list[Any] = []
        self.write_receipt = self.lines.append
        self.changed = list(changed)

    def _send(self, actor: Any, version: int) -> list[tuple[int, Any]]:
        changed = self.changed.pop(0)
        restarted = [(0, {"changed": None, "version": version - 1, "restarted": True})]
        found = {"changed": changed, "first": "a.weight", "version": version, "restarted": False}
        return [*restarted * (changed == RESTARTED), (0, found)]

    def _probe(self, actor: Any) -> None:
        self.lines.append("probe")


def test_weights_that_were_trained_and_are_the_same_end_the_run() -> None:
    """As those of an adapter that is not merged. The first weights are compared with none."""
    actor: Any = None
    group = OneReplica(None, 0, 3, 0)
    for version in (0, 1, 1, 2):
        group.update_weights(actor, version)
        group.moved = version == 1  # a step with gradient 0 leaves it False
    assert [line["version"] for line in group.lines] == [0, 1, 2]
    group.moved = True
    with pytest.raises(ValueError, match=r"version 3 are those of version 2, .*a\.weight"):
        group.update_weights(actor, 3)


def test_a_server_that_was_started_again_is_probed_and_gets_the_weights_again() -> None:
    actor: Any = None
    group = OneReplica(None, RESTARTED, 3, 3)
    for version in (0, 1, 2):
        group.update_weights(actor, version)
    found = [line if line == "probe" else line["version"] for line in group.lines]
    assert found == [0, 0, 1, "probe", 1, 2]  # the second 0: the receipt of the restart


def test_a_failed_server_gets_the_weights_of_the_version_that_the_others_have() -> None:
    actor: Any = None
    group = OneReplica(None, 0)
    group.moved = True
    for _ in range(2):
        group.update_weights(actor, 1)
    group._note_failures([SliceReport([], 0), SliceReport([], 2, server_has_failed=True)])
    for _ in range(2):
        group.update_weights(actor, 1)
    assert [line["version"] for line in group.lines] == [1, 1] and not group.server_has_failed


def test_a_whole_call_that_a_failed_server_has_cut_short_is_repeated(monkeypatch: Any) -> None:
    group = OneReplica(None, 3)
    group.run.runs_vllm = True
    group._version = 0
    reports = iter([["a", None], ["a", "b"]])
    called: list[Any] = []

    def call(*arguments: Any) -> Any:
        called.append(arguments)
        report = next(reports)
        return SimpleNamespace(result=lambda: report)

    group.group = SimpleNamespace(call=call, layout=SimpleNamespace(dp=1))  # type: ignore[assignment]
    group.update_weights(None, 1)  # type: ignore[arg-type]
    group._actor = SimpleNamespace()  # type: ignore[assignment]
    assert group.generate(PROMPTS, 5).result() == ["a", "b"]
    assert len(called) == 2 and len(group.lines) == 2, "weights came between"


def test_a_call_that_a_failed_server_has_cut_short_has_no_rows(monkeypatch: Any) -> None:
    """But a slice tells what has ended; a conversation goes on (`test_conversations.py`)."""
    role, _ = make(monkeypatch)
    role.replica = replace(role.replica, server_has_failed=lambda: True)
    assert role.generate(PROMPTS, 1).report is None
    role.add(PROMPTS, 1)
    report: Any = role.advance(None).report
    assert report.server_has_failed and len(report.ended) == 3


@pytest.mark.parametrize("gap", [0.009, 0.011, float("nan")])
def test_a_server_that_computes_another_model_ends_the_run(monkeypatch: Any, gap: float) -> None:
    """Rounding changes this model's log-probs by 0.005, so twice that is allowed."""
    calls: list[str] = []

    def answering(answer: Any) -> Any:
        def call(method: Any, *_: Any) -> Any:
            calls.append(method.__name__)
            return SimpleNamespace(result=lambda: [answer])

        return SimpleNamespace(call=call)

    actor: Any = SimpleNamespace(group=answering(ProbeReport([[-1.0, -2.0]], noise=0.005)))
    group = object.__new__(RolloutGroup)
    group.group = answering([[-1.0 - gap, -2.0 + gap]])
    lines: list[Any] = []
    group.write_receipt = lines.append
    monkeypatch.setattr(group, "_send", lambda _, version: [(0, {"version": version})])
    group.run = SimpleNamespace(  # type: ignore[assignment]
        training=SimpleNamespace(seq_length=8),
        actor_rollout=SimpleNamespace(architecture=SimpleNamespace(vocab_size=9)),
    )
    with (
        nullcontext() if gap < 0.01 else pytest.raises(ValueError, match="server 0 and of training")
    ):
        group._probe(actor)
    assert calls == ["begin_probe", "score", "end_probe"], "the weights are put back first"
    (line,) = lines
    assert line["version"] == -1 and line["log_prob_gap_limit"] == 0.01
    assert line["log_prob_gap"] == pytest.approx(gap, nan_ok=True, abs=1e-6)
