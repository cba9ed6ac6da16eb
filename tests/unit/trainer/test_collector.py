"""Which responses an iteration keeps, with roles that return prepared results."""

from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from mindspeed_rlxf.cluster.refs import Piece, RowsRef
from mindspeed_rlxf.config.enums import AdvEstimator
from mindspeed_rlxf.config.schema import AlgorithmConfig
from mindspeed_rlxf.data.batch import Prompts
from mindspeed_rlxf.roles.reports import GenerateReport, ScoreReport
from mindspeed_rlxf.roles.rollout import Sampling
from mindspeed_rlxf.trainer.collector import Collected, Collector

SIZE = 2  # responses to a prompt


@dataclass
class Answer:
    """A call that has ended: one replica."""

    handle: str
    report: Any
    num_rows: int
    seconds: float = 1.0

    def rows(self) -> RowsRef:
        return RowsRef((Piece(self.handle, self.num_rows),))

    def result(self) -> list[Any]:
        return [self.report]

    def with_earlier(self) -> list[Any]:
        return [self]


@dataclass
class Script:
    """Rollout, reward and prompts in one: batch b has the scores `scores[b]`."""

    scores: list[list[float]]
    generated: list[tuple[Prompts, bool]] = field(default_factory=list)
    next_id: int = 0

    def next_prompts(self) -> Prompts:
        count = len(self.scores[0])
        ids = list(range(self.next_id, self.next_id + count))
        self.next_id += count
        tokens = [np.array([i // SIZE]) for i in ids]
        truths = [f"answer {i}" for i in ids]
        columns = [{"row": i} for i in ids]
        return Prompts(ids, tokens, truths, [""] * count, [[9]] * count, columns)

    def generate(self, prompts, _seed, sampling=Sampling.TRAINING):
        self.generated.append((prompts, sampling))
        count = prompts.num_rows
        lengths = [1] * count, [i + 1 for i in prompts.sample_ids]
        report = GenerateReport(*lengths, [True] * count, count, 0, 0, sync_s=0.0)
        return Answer(f"responses {len(self.generated) - 1}", report, count)

    def score(self, rollouts: RowsRef) -> Answer:
        number = int(rollouts.pieces[0].handle.split()[1])
        scores = self.scores[number]
        return Answer(f"scores {number}", ScoreReport(scores), len(scores))


def collect(script, prompts, most=10, **keys):
    """What was collected, and its metrics."""
    config = SimpleNamespace(
        algorithm=AlgorithmConfig(max_num_gen_batches=most, **keys),
        actor_rollout=SimpleNamespace(n_samples_per_prompt=SIZE, max_new_tokens=64),
        training=SimpleNamespace(global_batch_size=prompts, seed=1),
    )
    roles = SimpleNamespace(rollout=script, reward=script)
    collector = Collector(config, roles, script)  # type: ignore[arg-type]
    found = collector.collect()
    assert found.rollouts.num_rows == found.scores.num_rows == prompts * SIZE
    return found, collector.metrics(found)


def seconds(found: Collected) -> dict[str, float]:
    """By phase, of all calls."""
    return {name: sum(call.seconds for call in calls) for name, calls in found.calls().items()}


def test_prompts_with_equal_scores_are_drawn_anew():
    script = Script([[1, 1, 0, 1, 0, 0], [1, 0, 1, 1, 0, 1]])
    found, metrics = collect(script, prompts=3, filter_groups=True)
    assert len(script.generated) == 2
    assert found.score_report().scores == [0, 1, 1, 0, 0, 1]
    # the same samples everywhere: ids 2 3 of the first batch, 6 7 and 10 11 of the second
    assert found.responses().responses == [3, 4, 7, 8, 11, 12]
    assert found.rollouts.selection == found.scores.selection == (2, 3, 6, 7, 10, 11)
    fields = found.sample_fields()
    assert fields[0] == {"data_source": "", "ground_truth": "answer 2", "extra_info": {"row": 2}}
    assert [each["extra_info"]["row"] for each in fields] == [2, 3, 6, 7, 10, 11]
    assert metrics == {"rollout/gen_batches": 2, "rollout/alike_groups": 0}
    assert seconds(found) == {"gen": 2.0, "reward": 2.0}


def test_the_filter_compares_scores_as_advantages_do():
    # scaled and clipped, 5 and 7 are both 1
    script = Script([[5, 7, 0, 1], [0, 1, 0, 1]])
    found, _ = collect(script, prompts=2, filter_groups=True, reward_clip=1.0)
    assert found.score_report().scores == [0, 1, 0, 1] and len(script.generated) == 2


@pytest.mark.parametrize("most", [1, 2])
def test_after_the_last_batch_alike_groups_fill_the_rest(most):
    script = Script([[1, 1, 0, 1, 0, 0]] * 2)
    found, metrics = collect(script, prompts=3, most=most, filter_groups=True)
    assert len(script.generated) == most
    assert found.kept == {1: [0, 1, 2, 3, 4, 5], 2: [0, 1, 2, 3, 8, 9]}[most]
    assert metrics["rollout/alike_groups"] == 3 - most


def test_without_a_limit_batches_are_drawn_until_enough_prompts_differ():
    script = Script([[1, 1]] * 12 + [[0, 1]])
    found, metrics = collect(script, prompts=1, most=None, filter_groups=True)
    assert len(script.generated) == 13 and metrics["rollout/alike_groups"] == 0
    assert found.kept == [24, 25]


def test_remax_answers_each_kept_prompt_greedily_once():
    script = Script([[1, 1, 0, 1], [1, 0, 0, 1], [7, 8]])
    found, _ = collect(script, prompts=2, filter_groups=True, adv_estimator=AdvEstimator.REMAX)
    prompts, sampling = script.generated[-1]
    assert sampling is Sampling.GREEDY and [int(ids[0]) for ids in prompts.token_ids] == [1, 2]
    assert prompts.responses == [[], []], "fixed responses are not greedy ones"
    assert found.greedy is not None and found.greedy_scores is not None
    assert found.greedy.selection == found.greedy_scores.selection == (0, 0, 1, 1)
    assert seconds(found) == {"gen": 3.0, "reward": 3.0}


def test_non_finite_scores_are_named_by_their_samples():
    nan, inf = float("nan"), float("inf")
    found, _ = collect(Script([[1, nan, 0, 0], [inf, 1, 1, 1]]), prompts=2, filter_groups=True)
    assert list(found.non_finite_scores()) == [1, 4], (
        "such a group is not dropped as one of equal scores"
    )
    script = Script([[1, 1, 0, 1], [0, inf]])
    found, _ = collect(script, prompts=2, adv_estimator=AdvEstimator.REMAX)
    assert found.non_finite_scores() == {2: inf}, "of the greedy response to the second prompt"
    assert collect(Script([[1, 1, 0, 1]]), prompts=2)[0].non_finite_scores() == {}


def test_a_replica_without_samples_hides_no_parts_and_failures_of_others():
    found, _ = collect(Script([[1, 0]]), prompts=1)
    empty, full = ScoreReport([], [], []), ScoreReport([1, 0], [{"a": 1.0}, {}], [None, None])
    found.batches[0].scored.result = lambda: [empty, full]  # type: ignore[method-assign]
    report = found.score_report()
    assert (report.scores, report.parts, report.failures) == (full.scores, full.parts, [None] * 2)
