"""Which groups form a batch, and what is drawn, whatever ends first."""

import random
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from mindspeed_rlxf.config.enums import AdvEstimator
from mindspeed_rlxf.config.schema import AlgorithmConfig, RolloutConfig
from mindspeed_rlxf.data.sampler import PromptSampler
from mindspeed_rlxf.roles.reports import FailedSample
from mindspeed_rlxf.roles.reward import RewardsFailed
from mindspeed_rlxf.roles.rollout import Sampling
from mindspeed_rlxf.trainer.prompt_source import PromptSource
from mindspeed_rlxf.trainer.samples import Samples, SampleStream
from tests.virtual_roles import (
    Clock,
    Lane,
    VirtualReward,
    VirtualRollout,
    make_prompts,
    through_json,
    values_of,
)

SIZE = 2  # samples of a group


def length_of(sample_id: int, sampling: Sampling) -> int:
    """Between 1 and 60 tokens."""
    return random.Random(2 * sample_id + (sampling is Sampling.GREEDY)).randrange(1, 61)


class Generation:
    """A stream over virtual roles: group g scores `scores[g]`."""

    def __init__(self, staleness=0, lead=0, prompts=2, scores=(), **algorithm: Any) -> None:
        self.config: Any = SimpleNamespace(
            algorithm=AlgorithmConfig(**algorithm),
            actor_rollout=SimpleNamespace(n_samples_per_prompt=SIZE),
            training=SimpleNamespace(global_batch_size=prompts, seed=1),
            rollout=RolloutConfig(max_staleness=staleness, slice_steps=8),
            runs_vllm=False,
            lead=lead,
        )
        self.scores = scores
        lane = Lane(Clock())
        self.rollout = VirtualRollout(lane, length_of, replicas=2, rows=3, group_size=SIZE)
        self.reward = VirtualReward(lane, self.score_of)
        sampler = PromptSampler(1000, prompts, 1, False)
        self.source = PromptSource(make_prompts(1000), sampler, SIZE)
        roles: Any = SimpleNamespace(rollout=self.rollout, reward=self.reward)
        self.stream = SampleStream(self.config, roles, self.source)

    def score_of(self, sample_id: int, _sampling: Sampling) -> float:
        group, number = divmod(sample_id, SIZE)
        return self.scores[group][number] if group < len(self.scores) else float(number)

    def next(self, batches_left: int = 100) -> Samples:
        self.stream.generate(batches_left)
        return self.stream.next_samples()


def test_without_staleness_only_missing_groups_are_drawn_again():
    run = Generation(prompts=3, scores=[[1, 1], [0, 1], [0, 0], [1, 0], [1, 1]], filter_groups=True)
    samples = run.next()
    # three, then the two that are missing, then one
    assert run.rollout.added == list(range(12))
    assert samples.sample_ids() == [2, 3, 6, 7, 10, 11]
    assert samples.passed_ids() == list(range(12))
    assert [each.sample_id for each in values_of(samples.rollouts)] == samples.sample_ids()
    assert values_of(samples.scores) == samples.score_report().scores == [0, 1, 1, 0, 0, 1]
    assert samples.responses().responses == [
        length_of(i, Sampling.TRAINING) for i in [2, 3, 6, 7, 10, 11]
    ]
    assert run.stream.metrics(samples) == {"rollout/gen_batches": 2, "rollout/alike_groups": 0}
    (report,) = samples.generate_reports()
    assert len(report.response_lengths) == 12, "dropped samples were generated too"
    fields = samples.sample_fields()
    assert fields[0] == {"data_source": "", "ground_truth": "answer 1", "extra_info": {}}
    assert samples.consumed.prompts == [0, 1, 2, 3, 4, 5]


def test_the_filter_compares_scores_as_advantages_do():
    # scaled and clipped, 5 and 7 are both 1
    run = Generation(prompts=1, scores=[[5, 7], [0, 1]], filter_groups=True, reward_clip=1.0)
    assert run.next().score_report().scores == [0, 1]


@pytest.mark.parametrize(("staleness", "lead"), [(0, 0), (1, 0), (1, 1), (3, 1)])
@pytest.mark.parametrize("most", [1, 2])
def test_after_the_last_batch_alike_groups_fill_the_rest(staleness, lead, most):
    scores = [[1, 1], [0, 1], [0, 0], [1, 1], [0, 0], [2, 2]]
    keys = {"filter_groups": True, "max_num_gen_batches": most}
    run = Generation(staleness, lead, prompts=3, scores=scores, **keys)
    samples = run.next()
    assert samples.sample_ids() == [0, 1, 2, 3, 4, 5]
    assert samples.passed_ids() == list(range(6 * most))
    assert run.stream.metrics(samples)["rollout/alike_groups"] == 2
    if not staleness:
        assert run.rollout.added == list(range(6 * most))
    assert run.next().sample_ids()[0] >= 6 * most


def test_without_a_limit_groups_are_drawn_until_enough_differ():
    keys = {"filter_groups": True, "max_num_gen_batches": None}
    run = Generation(prompts=1, scores=[[1, 1]] * 12, **keys)
    assert run.next().sample_ids() == [24, 25]


@pytest.mark.parametrize(("staleness", "lead"), [(0, 0), (1, 1), (2, 0)])
def test_remax_answers_each_trained_prompt_greedily_once(staleness, lead):
    scores = [[1, 1], [0, 1], [1, 0], [2, 3]]
    keys = {"filter_groups": True, "adv_estimator": AdvEstimator.REMAX}
    run = Generation(staleness, lead, scores=scores, **keys)
    samples = run.next()
    assert samples.sample_ids() == [2, 3, 4, 5] and samples.greedy_rows is not None
    rows = values_of(samples.greedy_rows[0])
    assert [each.sample_id for each in rows] == [2, 2, 4, 4]
    assert all(each.sampling is Sampling.GREEDY for each in rows)
    assert values_of(samples.greedy_rows[1]) == [0, 0, 1, 1]


def test_failed_scores_count_over_a_batch_and_not_over_what_is_scored_at_once():
    run = Generation(prompts=3, scores=[[1, 1], [0, 1], [0, 0], [1, 0], [1, 1]], filter_groups=True)
    score = run.stream.reward.score

    def with_failures(rollouts, is_batch=True):
        assert not is_batch
        call = score(rollouts, is_batch)
        ids = [response.sample_id for response in values_of(rollouts)]
        failures = [FailedSample(i, "timeout", "") if i in (0, 6) else None for i in ids]
        call.report = replace(call.report, failures=failures)
        return call

    run.stream.reward.score = with_failures  # type: ignore[method-assign]
    run.config.reward = SimpleNamespace(max_failed=1)
    run.stream.generate(9)  # of three calls each has one failure at most
    with pytest.raises(RewardsFailed, match="2 of 12 samples of a batch"):
        run.stream.next_samples()


def test_an_error_of_a_slice_comes_before_that_of_the_rows_that_it_lacks():
    run = Generation()
    advance = run.rollout.advance

    def failing(steps):
        call = advance(steps)
        call.result = lambda: pytest.fail("of the slice", pytrace=False)
        return call

    run.rollout.advance = failing  # type: ignore[method-assign]
    samples = run.next()
    with pytest.raises(pytest.fail.Exception, match="of the slice"):
        samples.taken.result()


@pytest.mark.parametrize(("staleness", "lead"), [(1, 0), (1, 1), (3, 0), (3, 1)])
def test_batches_are_trained_in_order_and_so_many_are_in_flight(staleness, lead):
    run = Generation(staleness, lead)
    for number in range(6):
        run.stream.generate(6 - number)
        batches = min(staleness - lead + 1, 6 - number)
        assert len(run.rollout.added) == (number + batches) * 2 * SIZE
        samples = run.stream.next_samples()
        assert samples.sample_ids() == [4 * number + i for i in range(4)]
    assert not run.rollout.known, "nothing is generated that no iteration trains"


def test_unfinished_responses_go_on_in_the_next_batch_and_keep_their_tokens():
    run = Generation(staleness=3)
    run.next()
    begun = [each for each in run.rollout.known.values() if 0 < each.drawn < each.length]
    assert begun and not any(run.rollout.batches), "they have left the engine"
    run.rollout.version = 1
    for _ in range(3):
        run.next()
    mixed = [each for each in begun if {version for version, _ in each.versions} == {0, 1}]
    assert mixed == begun
    assert all(sum(n for _, n in each.versions) == each.length for each in begun)


def test_groups_that_were_generated_beyond_a_batch_are_trained_next():
    """Without them a filter would throw away what it has paid for."""
    run = Generation(3, 1, filter_groups=True, scores=[[1, 1], [0, 1], [2, 2]])
    trained = [i for _ in range(5) for i in run.next().sample_ids()]
    dropped = {0, 1, 4, 5}
    assert trained == [i for i in range(24) if i not in dropped]


def test_scores_are_read_exactly_one_slice_after_the_responses_ended():
    run = Generation(3, 1, filter_groups=True, scores=[[1, 1], [0, 1], [2, 2], [0, 1]])
    advance, take, score = run.rollout.advance, run.rollout.take, run.stream.reward.score
    ended_in: dict[int, int] = {}  # sample id -> slice
    slices, taken_ids, read_after = 0, [], []

    def counted(steps):
        nonlocal slices
        slices += 1
        call = advance(steps)
        for report in call.result():
            ended_in.update((ended[0], slices) for ended in report.ended)
        return call

    def named(sample_ids, *how):
        taken_ids[:] = sample_ids
        return take(sample_ids, *how)

    def watched(rollouts, is_batch=True):
        call, ended = score(rollouts, is_batch), max(ended_in[i] for i in taken_ids)
        result, reads = call.result, []

        def read():
            reads.append(slices)
            if len(reads) == 1:
                read_after.append(slices - ended)
            return result()

        call.result = read
        return call

    run.rollout.advance = counted  # type: ignore[method-assign]
    run.rollout.take = named  # type: ignore[method-assign]
    run.stream.reward.score = watched  # type: ignore[method-assign]
    for batches_left in (10, 9, 8):
        run.stream.generate(batches_left)
        run.stream.next_samples()
    assert len(read_after) > 2 and set(read_after) == {1}


def test_an_early_end_of_other_groups_changes_no_batch():
    """The slices say what is known when; what ends in them may come in any order."""
    runs = [Generation(3, 1, filter_groups=True, scores=[[1, 1], [0, 1]] * 9) for _ in range(2)]
    advance = runs[1].rollout.advance

    def reversed_reports(steps):
        call = advance(steps)
        call.report.ended.reverse()
        return call

    runs[1].rollout.advance = reversed_reports  # type: ignore[method-assign]
    for _ in range(6):
        one, other = (run.next() for run in runs)
        assert one.sample_ids() == other.sample_ids()
        assert one.passed_ids() == other.passed_ids()
        assert runs[0].rollout.added == runs[1].rollout.added


@pytest.mark.parametrize("filters", [False, True])
@pytest.mark.parametrize("estimator", [AdvEstimator.GAE, AdvEstimator.REMAX])
@pytest.mark.parametrize(("staleness", "lead"), [(1, 0), (1, 1), (3, 0), (3, 1)])
def test_a_resumed_stream_is_the_unfailed_one(staleness, lead, estimator, filters):
    """Interrupted after each batch, with what the generating ranks had saved."""
    scores = [[1, 1], [0, 1], [2, 2], [0, 1], [1, 1]] * 5
    given = {"scores": scores, "filter_groups": filters, "adv_estimator": estimator}
    whole, cut = Generation(staleness, lead, **given), Generation(staleness, lead, **given)
    for number in range(7):
        run = Generation(staleness, lead, **given)
        run.rollout.version = number
        run.rollout.saved = cut.rollout.ahead()
        run.source.load_state_dict(through_json(cut.source.state_dict()))
        run.stream.load_state_dict(through_json(cut.stream.state_dict()))
        cut, whole.rollout.version = run, number
        ours, theirs = (each.next(7 - number) for each in (cut, whole))
        assert ours.sample_ids() == theirs.sample_ids()
        assert ours.consumed == theirs.consumed
        assert values_of(ours.rollouts) == values_of(theirs.rollouts), "the same tokens"
        assert ours.score_report() == theirs.score_report()
        assert cut.rollout.known == whole.rollout.known
        assert cut.stream.state_dict() == whole.stream.state_dict()


def test_without_the_saved_samples_a_resumed_stream_draws_them_once():
    run = Generation(3, 1)
    run.next()
    again = Generation(3, 1)
    again.source.load_state_dict(through_json(run.source.state_dict()))
    ids = [i for _ in range(3) for i in again.next().sample_ids()]
    assert ids == list(range(4, 16))


def test_non_finite_scores_are_named_by_their_samples():
    nan, inf = float("nan"), float("inf")
    run = Generation(scores=[[1, nan], [inf, 1]], filter_groups=True)
    assert list(run.next().non_finite_scores()) == [1, 2], (
        "such a group is not dropped as one of equal scores"
    )
    run = Generation(prompts=1, scores=[[0, inf]], adv_estimator=AdvEstimator.REMAX)
    run.reward.score_of = lambda i, s: inf if s is Sampling.GREEDY else 0.0
    assert run.next().non_finite_scores() == {0: inf}, "of the greedy response"
    assert Generation().next().non_finite_scores() == {}
