"""An engine that only generates whole responses takes part in slices."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from mindspeed_rlxf.rollout.replica import in_slices
from mindspeed_rlxf.rollout.rollout_engine import (
    Begun,
    FinishReason,
    GenerationRequest,
    GenerationResult,
    GenerationStats,
    RolloutEngine,
)
from mindspeed_rlxf.rollout.whole_responses import WholeResponses
from tests.unit.rollout.test_native import TinyModel, engine, requests, settings


class OneToken(RolloutEngine):
    """Each response is the token 7."""

    weights_version = 4

    def __init__(self) -> None:
        self.calls: list[list[int]] = []

    def generate(self, asked: Sequence[GenerationRequest]) -> Iterator[GenerationResult]:
        self.calls.append([request.sample_id for request in asked])
        for request in asked:
            yield GenerationResult(request.place, [7], [-0.5], FinishReason.STOP, 4)

    def stats(self) -> GenerationStats:
        return GenerationStats(sampled_tokens=sum(map(len, self.calls)))


def test_a_slice_generates_all_that_was_added_and_nothing_is_left() -> None:
    whole: Any = OneToken()
    rollout = in_slices(whole)
    first, second, third = requests([np.array([1])] * 3, range(3), settings())
    rollout.add([first, replace(second, begun=Begun([5], [-0.1], [2]))])
    found = list(rollout.advance(1))
    assert [(r.place, r.tokens, r.token_versions) for r in found] == [(0, [7], [4]), (1, [7], [4])]
    assert rollout.withdraw() == [] and rollout.stats().sampled_tokens == 2
    rollout.add([third])
    assert rollout.withdraw() == [third], "nothing has begun to generate it"
    assert list(rollout.advance(None)) == [] and whole.calls == [[0, 1], []]


def test_an_engine_that_counts_its_steps_needs_no_adapter() -> None:
    native = engine(TinyModel())
    assert in_slices(native) is native
    whole: Any = OneToken()
    assert isinstance(in_slices(whole), WholeResponses)
