"""Roles that compute nothing: responses of given lengths, in virtual time.

A call occupies its lane (the generating or the training ranks) from the later of its submission and
the lane's last call on, and a wait moves the clock to its end, so that a driver under test sees the
order of events of real pools, and a kill may come at any moment.
"""

from __future__ import annotations

import copy
import heapq
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np

from mindspeed_rlxf.cluster.interface import Reply
from mindspeed_rlxf.cluster.refs import RankRows, RowsRef
from mindspeed_rlxf.data.batch import Prompts
from mindspeed_rlxf.roles.reports import GenerateReport, ScoreReport
from mindspeed_rlxf.roles.rollout import Sampling

STEP_S, ROW_S = 0.02, 0.0001  # seconds per decode step, and per row of it
PROMPT_TOKENS, PREFILL_TOKENS_PER_S = 300, 15_000.0


class Killed(Exception):
    """The process under test got a SIGKILL."""


class Clock:
    """Virtual seconds of the driver; raises Killed from `kill_at` on."""

    def __init__(self, kill_at: float = float("inf")) -> None:
        self.now, self.kill_at = 0.0, kill_at

    def wait_until(self, end: float) -> None:
        self.now = max(self.now, end)
        if self.now >= self.kill_at:
            raise Killed


@dataclass
class Lane:
    """Ranks that run one call after another."""

    clock: Clock
    free_at: float = 0.0
    busy_s: float = 0.0

    def submit(
        self,
        seconds: float,
        report: Any = None,
        rows: Sequence[Any] = (),
        inputs: Sequence[RowsRef] = (),
    ) -> Call:
        """Start a call as soon as the lane is free and the rows that it reads are there."""
        producers = [piece.handle for ref in inputs for piece in ref.pieces]
        ready = max((call.started + call.seconds for call in producers), default=0.0)
        start = max(self.clock.now, self.free_at, ready)
        self.free_at = start + seconds
        self.busy_s += seconds
        return Call(self.clock, start, seconds, report, list(rows))


@dataclass(eq=False)
class Call:
    """A call of one replica; `values` are its rows."""

    clock: Clock
    started: float
    seconds: float
    report: Any
    values: list[Any]
    pool: str = "main"
    before: list[Call] = field(default_factory=list)

    def rows(self) -> RowsRef:
        return RowsRef((RankRows(self, len(self.values)),))

    def result(self) -> list[Any]:
        for call in self.before:
            call.result()
        self.clock.wait_until(self.started + self.seconds)
        return [self.report]

    def replies(self) -> list[Reply]:
        self.result()
        return [Reply(self.report, len(self.values), self.seconds, 0, self.started)]

    def in_order(self, values: Sequence[Any]) -> list[Any]:
        return list(values)

    def after(self, other: Call) -> Call:
        self.before.append(other)
        return self

    def with_earlier(self) -> list[Call]:
        return [*self.before, self]


def values_of(ref: RowsRef) -> list[Any]:
    """Return the values that a reference to rows of `Call`s stands for."""
    everything = [value for piece in ref.pieces for value in piece.handle.values]
    return everything if ref.selection is None else [everything[row] for row in ref.selection]


@dataclass
class Response:
    """A response of a known length; `versions` has the weights version of each token drawn."""

    sample_id: int
    sampling: Sampling
    length: int
    versions: list[tuple[int, int]] = field(default_factory=list)  # (version, number of tokens)
    drawn: int = 0
    entered: int = field(default=0, compare=False)  # step of the replica at which it was admitted

    @property
    def order(self) -> tuple[int, bool]:
        """Position in the stream."""
        return self.sample_id, self.sampling is Sampling.GREEDY

    @property
    def has_ended(self) -> bool:
        return self.drawn >= self.length

    def draw(self, step: int, version: int) -> None:
        """Count the tokens drawn since it was admitted, up to a step of its replica."""
        steps = step - self.entered
        if not steps:
            return
        self.drawn += steps
        if self.versions and self.versions[-1][0] == version:
            steps += self.versions.pop()[1]
        self.versions.append((version, steps))


class VirtualRollout:
    """The calls of `RolloutGroup` over replicas that decode up to `rows` responses at once.

    Like the real role it knows responses by sample id until `forget`, and after `load_ahead` keeps
    those that are added again.

    Attributes:
        failures: Slices in which a server fails after a few steps, counted from 1.
    """

    def __init__(
        self,
        lane: Lane,
        length_of: Callable[[int, Sampling], int],
        replicas: int = 1,
        rows: int = 128,
        group_size: int = 1,
    ) -> None:
        self.lane, self.length_of = lane, length_of
        self.replicas, self.rows, self.group_size = replicas, rows, group_size
        self.known: dict[tuple[int, Sampling], Response] = {}
        self.saved: dict[tuple[int, Sampling], Response] = {}  # of `load_ahead`
        self.queues: list[list[Response]] = [[] for _ in range(replicas)]
        # Decoded responses, as a heap of (step at which it ends, order, response).
        self.batches: list[list[tuple[int, tuple[int, bool], Response]]]
        self.batches = [[] for _ in range(replicas)]
        self.steps = [0] * replicas  # decode steps so far
        self.untold: list[Response] = []  # known ended ones of `load_ahead`
        self.version = 0
        self.check_weights: Callable[[int], None] = lambda _: None
        self.moved = False
        self.failures: set[int] = set()
        self.num_slices = 0
        self.server_has_failed = False
        self.drawn_again = 0  # tokens that a resumed run draws a second time
        self.added: list[int] = []

    def update_weights(self, _actor: Any, version: int) -> None:
        assert not any(self.batches), "weights change while responses are in the engine"
        self.check_weights(version)
        self.version = version
        self.server_has_failed = False

    def add(self, prompts: Prompts, _seed: int, sampling: Sampling = Sampling.TRAINING) -> Call:
        for sample_id in prompts.sample_ids:
            key = sample_id, sampling
            assert key not in self.known, f"sample {sample_id} was added twice"
            self.added.append(sample_id)
            response = self.saved.pop(key, None)
            if response is None:
                response = Response(sample_id, sampling, self.length_of(sample_id, sampling))
            self.known[key] = response
            if response.has_ended:
                self.untold.append(response)
            else:
                self.queues[sample_id // self.group_size % self.replicas].append(response)
        return self.lane.submit(0.0)

    def advance(self, steps: int | None) -> Call:
        assert not self.server_has_failed, "new weights come first, with a new server"
        self.num_slices += 1
        if self.num_slices in self.failures:
            self.server_has_failed = True
            steps = 4
        ended, self.untold = self.untold, []
        seconds = [0.0]
        for replica, queue in enumerate(self.queues):
            queue.sort(key=lambda response: response.order)
            seconds.append(self._advance(replica, steps, ended))
        report = SimpleNamespace(
            ended=[(each.sample_id, each.sampling, each.length, True) for each in ended],
            unfinished=sum(map(len, self.queues)) + sum(map(len, self.batches)),
        )
        return self.lane.submit(max(seconds), report)

    def _advance(
        self,
        replica: int,
        steps: int | None,
        ended: list[Response],
    ) -> float:
        """Run a replica's part of a slice; return its seconds."""
        queue, batch = self.queues[replica], self.batches[replica]
        seconds = 0.0
        last_step = float("inf") if steps is None else self.steps[replica] + steps
        while self.steps[replica] < last_step:
            while queue and len(batch) < self.rows:
                response = queue.pop(0)
                if response.drawn:  # it was withdrawn: its prompt and what was drawn come again
                    seconds += (PROMPT_TOKENS + response.drawn) / PREFILL_TOKENS_PER_S
                response.entered = self.steps[replica]
                last = response.entered + response.length - response.drawn
                heapq.heappush(batch, (last, response.order, response))
            if not batch:
                break
            next_step = int(min(last_step, batch[0][0]))
            seconds += (next_step - self.steps[replica]) * (STEP_S + ROW_S * len(batch))
            self.steps[replica] = next_step
            while batch and batch[0][0] == next_step:
                response = heapq.heappop(batch)[2]
                response.draw(next_step, self.version)
                ended.append(response)
        return seconds

    def take(self, sample_ids: list[int], sampling: Sampling = Sampling.TRAINING) -> Call:
        responses = [self.known[i, sampling] for i in sample_ids]
        assert all(response.has_ended for response in responses), "rows of unfinished responses"
        return self.lane.submit(0.0, self._report(responses), responses)

    def generate(self, prompts: Prompts, seed: int, sampling: Sampling) -> Call:
        self.add(prompts, seed, sampling)
        self.advance(None)
        call = self.take(prompts.sample_ids, sampling)
        self.forget(prompts.sample_ids, sampling)
        return call

    def _report(self, responses: list[Response]) -> GenerateReport:
        count = len(responses)
        return GenerateReport(
            prompt_lengths=[PROMPT_TOKENS] * count,
            response_lengths=[response.length for response in responses],
            has_eos=[True] * count,
            prompt_tokens=0,
            decoded_tokens=0,
            sampled_tokens=0,
            sync_s=0.0,
            oldest_versions=[min(v for v, _ in response.versions) for response in responses],
            mean_versions=[0.0] * count,
        )

    def withdraw(self) -> Call:
        for replica, batch in enumerate(self.batches):
            for _, _, response in batch:
                response.draw(self.steps[replica], self.version)
                self.queues[replica].append(response)
            batch.clear()
        return self.lane.submit(0.0)

    def forget(self, sample_ids: list[int], *samplings: Sampling) -> Call:
        for sample_id in sample_ids:
            for sampling in samplings or (Sampling.TRAINING, Sampling.GREEDY):
                self.known.pop((sample_id, sampling), None)
        return self.lane.submit(0.0)

    def ahead(self) -> dict[tuple[int, Sampling], Response]:
        """Return what `save_ahead` writes."""
        return copy.deepcopy(self.known)


class VirtualReward:
    """Scores responses by sample id, in no time of the ranks."""

    def __init__(self, lane: Lane, score_of: Callable[[int, Sampling], float]) -> None:
        self.lane, self.score_of = lane, score_of

    def score(self, rollouts: RowsRef, is_batch: bool = True) -> Call:
        responses = values_of(rollouts)
        scores = [self.score_of(each.sample_id, each.sampling) for each in responses]
        return self.lane.submit(0.0, ScoreReport(scores), scores, [rollouts])


def make_prompts(count: int) -> list[Any]:
    """Return prompts of one token."""
    from mindspeed_rlxf.data.prompts import Prompt

    return [Prompt(i, "", np.array([i]), f"answer {i}", "") for i in range(count)]


def through_json(state: dict[str, Any]) -> dict[str, Any]:
    """Return a state as a checkpoint gives it back."""
    result: dict[str, Any] = json.loads(json.dumps(state))
    return result
