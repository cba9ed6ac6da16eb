"""Samples between `add` and `forget`: slices, points, rows in any order, a resumed run."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from mindspeed_rlxf.cluster.interface import Reply
from mindspeed_rlxf.cluster.refs import RowsRef, resolve
from mindspeed_rlxf.config.generation_memory import Capacities
from mindspeed_rlxf.config.rank_layout import ParallelLayout
from mindspeed_rlxf.config.schema import ActorConfig, RolloutConfig, ValidationConfig
from mindspeed_rlxf.data.batch import Prompts, Rollouts
from mindspeed_rlxf.roles.rollout import RolloutGroup, RolloutRole, Sampling
from mindspeed_rlxf.rollout import replica as replicas
from tests.unit.rollout.conftest import whole_model_decodes
from tests.unit.rollout.test_native import EOS, VOCAB, TinyModel, engine

__all__ = ["whole_model_decodes"]  # a fixture
SIZE, LONGEST = 2, 9  # samples of a prompt, tokens of a response
SEED = 5


def config(staleness: int = 1, **actor: Any) -> Any:
    keys = {"max_new_tokens": LONGEST, "temperature": 2.0, "n_samples_per_prompt": SIZE} | actor
    return SimpleNamespace(
        actor_rollout=ActorConfig.model_construct(**keys),
        validation=ValidationConfig(),
        rollout=RolloutConfig(max_staleness=staleness),
        train_rollout_split=None,
    )


@pytest.fixture
def make_role(monkeypatch: pytest.MonkeyPatch) -> Any:
    def make(run: Any = None, max_rows: int | None = 3, scorer: Any = None) -> RolloutRole:
        native = engine(TinyModel(), max_rows, capacities=Capacities(8, LONGEST, 8))
        weights = TinyModel().state_dict()

        def take_weights(version: int, with_base: bool) -> None:
            native.update_weights(weights.items(), version)

        replica = replicas.Replica(native, take_weights, is_leader=True)
        monkeypatch.setattr(replicas, "build_replica", lambda *_: replica)
        return RolloutRole(run or config(), [EOS], scorer=scorer)

    return make


def prompts_of(*groups: int, size: int = SIZE) -> Prompts:
    """Rows of the prompts with these numbers; a prompt's tokens follow from its number."""
    tokens = [np.random.default_rng(g).integers(1, VOCAB, size=2 + g % 5) for g in groups]
    ids = [group * SIZE + n for group in groups for n in range(size)]
    count = len(ids)
    rows = [each for each in tokens for _ in range(size)]
    return Prompts(ids, rows, [f"truth of {i}" for i in ids], ["a"] * count, [[]] * count)


def run_slices(role: RolloutRole, steps: int | None, most: int = 40) -> list[Any]:
    """Slices until nothing is left; what they report."""
    reports = []
    while not reports or reports[-1].unfinished:
        reports.append(role.advance(steps).report)
        assert len(reports) <= most
    return reports


def same_rows(ours: Any, theirs: Any) -> None:
    assert ours.response_tokens() == theirs.response_tokens()
    assert ours.sample_ids == theirs.sample_ids and ours.ground_truths == theirs.ground_truths
    assert ours.has_eos.tolist() == theirs.has_eos.tolist()
    log_probs, expected = (rows.rollout_log_probs[rows.response_mask] for rows in (ours, theirs))
    assert log_probs.tolist() == pytest.approx(expected.tolist(), abs=1e-6)


@pytest.mark.parametrize("steps", [1, 4, None])
def test_slices_return_the_rows_of_one_call(make_role, steps):
    prompts = prompts_of(0, 1, 2)
    whole: Any = make_role().generate(prompts, SEED)
    role = make_role()
    role.add(prompts, SEED)
    reports = run_slices(role, steps)
    ended = [response for report in reports for response in report.ended]
    lengths = {response.sample_id: response.response_length for response in ended}
    assert sorted(lengths) == prompts.sample_ids and len(ended) == 6
    assert all(response.sampling is Sampling.TRAINING for response in ended)
    output: Any = role.take(prompts.sample_ids)
    same_rows(output.rows, whole.rows)
    found, expected = output.report, whole.report
    assert [lengths[i] for i in prompts.sample_ids] == found.response_lengths
    assert {r.sample_id: r.has_eos for r in ended}[0] == found.has_eos[0]
    for name in ("sampled_tokens", "prompt_tokens", "decoded_tokens", "response_lengths"):
        assert getattr(found, name) == getattr(expected, name)
    again: Any = role.take([4, 1])
    assert again.rows.sample_ids == [4, 1] and again.report.sampled_tokens == 0


def test_after_a_point_samples_enter_in_the_order_of_the_stream(make_role):
    """Whenever they were added, as a resumed run adds all at once; a cache is not kept."""
    role = make_role(max_rows=2)
    entered: list[list[int]] = []
    add = role.replica.engine.add

    def noted(asked: Any) -> None:
        entered.append([request.sample_id for request in asked])
        add(asked)

    role.replica.engine.add = noted  # type: ignore[method-assign]
    role.add(prompts_of(2), SEED)
    role.add(prompts_of(1, size=1), SEED, Sampling.GREEDY)
    role.add(prompts_of(1), SEED)
    role.advance(2)
    role.add(prompts_of(0), SEED)
    role.withdraw()
    role.update_weights(1, with_base=True)
    assert entered == [[2, 2, 3, 4, 5]]
    role.advance(1)
    assert entered[1] == sorted(entered[1]) and entered[1][:2] == [0, 1]
    (report,) = run_slices(role, None)
    assert report.unfinished == 0
    versions = role.take([2, 3, 4, 5]).rows.weights_version  # type: ignore[union-attr]
    assert versions[0].tolist()[:3] == [0, 0, 0] and versions.max() == 1
    report = role.take([2], Sampling.GREEDY).report
    assert report.oldest_versions[0] <= report.mean_versions[0] <= 1


def test_weights_do_not_change_while_the_engine_has_samples(make_role):
    role = make_role()
    role.add(prompts_of(0, 1), SEED)
    assert role.advance(1).report.unfinished
    with pytest.raises(AssertionError, match="withdraw"):
        role.update_weights(1, with_base=True)


def test_an_engine_that_leaves_the_device_goes_on_later(make_role):
    prompts = prompts_of(0, 1)
    whole: Any = make_role().generate(prompts, SEED).rows
    role = make_role()
    role.add(prompts, SEED)
    role.advance(2)
    role.leave_device()
    assert role.samples.are_withdrawn, "their cache would stay on the device"
    run_slices(role, None)
    same_rows(role.take(prompts.sample_ids).rows, whole)


def test_only_ended_samples_are_taken_and_forgotten(make_role):
    role = make_role()
    role.add(prompts_of(0, 1), SEED)
    role.advance(0)
    with pytest.raises(AssertionError, match="sample 3 has not ended"):
        role.take([3])
    with pytest.raises(AssertionError, match="sample 3 is forgotten"):
        role.forget([3])
    run_slices(role, None)
    role.forget([0, 1, 77])
    with pytest.raises(KeyError):
        role.take([0])
    assert role.take([]).rows.num_rows == 0  # type: ignore[union-attr]


def test_fixed_responses_end_in_the_first_slice_beside_generated_ones(make_role):
    role = make_role()
    fixed = replace(prompts_of(0), responses=[[5, EOS], [6]])
    role.add(fixed, SEED, has_fixed=True)
    role.add(prompts_of(0, size=1), SEED, Sampling.GREEDY)
    first = role.advance(0).report
    assert [response.sample_id for response in first.ended] == [0, 1] and first.unfinished == 1
    run_slices(role, 1)
    rows: Any = role.take([1, 0]).rows
    assert rows.response_tokens() == [[6], [5, EOS]] and rows.has_eos.tolist() == [False, True]
    greedy: Any = make_role().generate(prompts_of(0, size=1), SEED, Sampling.GREEDY).rows
    same_rows(role.take([0], Sampling.GREEDY).rows, greedy)


class LocalCalls:
    """A pool that runs each request at once on the role of its rank."""

    name = "main"

    def __init__(self, *roles: RolloutRole) -> None:
        self.roles, self.world_size = roles, len(roles)
        self.store: dict[int, Any] = {}

    def submit(self, requests: Any, first_rank: int = 0) -> Any:
        replies, handles = [], []
        for rank, (role, request) in enumerate(zip(self.roles, requests, strict=True)):
            output = getattr(role, request.method)(*request.args)
            handles.append(len(self.store))
            self.store[handles[-1]] = output.rows
            count = None if output.rows is None else output.rows.num_rows
            replies.append(Reply(output.report, count, 0.0, rank))
        return SimpleNamespace(wait=lambda: replies, handles=handles)

    def read(self, ref: RowsRef) -> Any:
        return resolve(ref, lambda handles: [self.store[handle] for handle in handles])


def make_group(run: Any, *roles: RolloutRole) -> tuple[RolloutGroup, LocalCalls]:
    pool: Any = LocalCalls(*roles)
    run.rollout_layout = ParallelLayout(len(roles), 1)
    return RolloutGroup(run, pool), pool


@pytest.mark.parametrize("staleness", [0, 1])
def test_replicas_share_samples_unevenly_and_rows_come_in_the_order_asked_for(make_role, staleness):
    run = config(staleness)
    group, pool = make_group(run, *(make_role(run) for _ in range(2)))
    prompts = prompts_of(0, 1, 2, 3, 4, 5)
    one: Any = make_role().generate(prompts, SEED).rows
    for added in ((0, 1, 2), (3, 4, 5)):  # 6 rows: equal parts; three prompts in turn
        group.add(prompts_of(*added), SEED)
    group.advance(None).result()
    has = [[s.request.sample_id for s in role.samples.known] for role in pool.roles]
    assert has == (
        [[0, 1, 2, 6, 7, 8], [3, 4, 5, 9, 10, 11]]
        if staleness == 0
        else [[0, 1, 4, 5, 8, 9], [2, 3, 6, 7, 10, 11]]
    )
    for ids in (prompts.sample_ids, [7, 0, 10, 3], [1, 0]):
        taken = group.take(ids)
        rows: Rollouts = pool.read(taken.rows())
        same_rows(rows, one.select(ids))
        reports = taken.result()
        assert len(reports) == 2 and sum(len(r.response_lengths) for r in reports) == len(ids)
    group.forget(prompts.sample_ids)
    assert not any(role.samples.known for role in pool.roles)


def test_at_staleness_0_prompts_are_not_cut_where_replicas_cannot_have_equal_parts(make_role):
    run = config(0)
    group, pool = make_group(run, *(make_role(run) for _ in range(4)))
    group.add(prompts_of(3, 5, 7), SEED)
    has = [[s.request.sample_id for s in role.samples.known] for role in pool.roles]
    assert sorted(has) == [[], [6, 7], [10, 11], [14, 15]]


@pytest.mark.parametrize("replicas", [1, 3])
def test_a_resumed_run_goes_on_with_what_was_sampled_in_any_layout(make_role, tmp_path, replicas):
    run = config()
    prompts = prompts_of(0, 1, 2, 3)
    whole: Any = make_role().generate(prompts, SEED).rows
    group, pool = make_group(run, *(make_role(run) for _ in range(2)))
    group.add(prompts, SEED)
    group.add(prompts_of(1, size=1), SEED, Sampling.GREEDY)
    (first, second) = group.advance(3).result()
    ended = {response[:2]: response for response in (*first.ended, *second.ended)}
    assert ended and first.unfinished and second.unfinished
    group.withdraw()
    known = [sample for role in pool.roles for sample in role.samples.known]
    sampled = sum(len(sample.request.begun.tokens) for sample in known if sample.request.begun)
    entries = [entry for report in group.save_ahead(tmp_path).result() for entry in report]
    assert {entry["path"] for entry in entries} == {file.name for file in tmp_path.iterdir()}

    resumed, pool = make_group(run, *(make_role(run) for _ in range(replicas)))
    resumed.load_ahead(tmp_path)
    resumed.add(prompts, SEED)
    resumed.add(prompts_of(1, size=1), SEED, Sampling.GREEDY)
    reports = resumed.advance(0).result()
    assert {each[:2]: each for report in reports for each in report.ended} == ended
    assert sum(report.unfinished for report in reports) == first.unfinished + second.unfinished
    resumed.advance(None)
    taken = resumed.take(prompts.sample_ids)
    same_rows(pool.read(taken.rows()), whole)
    counts = [*taken.result(), *resumed.take([2], Sampling.GREEDY).result()]
    new = sum(whole.response_lengths.tolist()) - sampled
    new -= sum(response.response_length for response in ended.values())
    new += sum(r.response_lengths[0] for r in counts[replicas:] if r.response_lengths)
    assert sum(report.sampled_tokens for report in counts) == new, "nothing is sampled twice"


def test_a_run_that_resumes_at_a_point_generates_as_the_unfailed_one(make_role, tmp_path):
    """To the bit: it adds at once, and in another order, what was added over time."""
    unfailed = make_role(max_rows=2)
    unfailed.add(prompts_of(1, 2), SEED)
    unfailed.advance(3)
    unfailed.add(prompts_of(1, size=1), SEED, Sampling.GREEDY)
    unfailed.add(prompts_of(3), SEED)
    unfailed.advance(1)
    unfailed.save_ahead(tmp_path, 0)
    unfailed.update_weights(1, with_base=True)
    unfailed.add(prompts_of(4), SEED)
    resumed = make_role(max_rows=2)
    resumed.load_ahead(tmp_path)
    resumed.update_weights(1, with_base=True)
    resumed.add(prompts_of(1, size=1), SEED, Sampling.GREEDY)
    resumed.add(prompts_of(1, 2, 3, 4), SEED)
    ids = prompts_of(1, 2, 3, 4).sample_ids
    rows, ended = [], []
    for role in (unfailed, resumed):
        ended.append([report.ended for report in run_slices(role, 2)])
        rows.append((role.take(ids).rows, role.take([2], Sampling.GREEDY).rows))
    assert len(ended[0]) > 3 and ended[1][1:] == ended[0][1:]
    assert set(ended[0][0]) <= set(ended[1][0]), "which also has what had ended before"
    for ours, theirs in zip(*rows, strict=True):
        assert ours.response_tokens() == theirs.response_tokens()
        assert ours.rollout_log_probs.tolist() == theirs.rollout_log_probs.tolist()
        assert ours.weights_version.tolist() == theirs.weights_version.tolist()


class Started:
    """A scorer that notes what it starts; outcomes are numbers."""

    is_leader = True

    def __init__(self) -> None:
        self.outcomes: dict[tuple[int, ...], Any] = {}
        self.started: list[int] = []

    def start(self, prompt: Prompts, result: Any) -> None:
        if (prompt.sample_ids[0], *result.tokens) not in self.outcomes:
            self.started.append(prompt.sample_ids[0])

    def save_outcomes(self, sample_id: int, response: Any) -> Any:
        return [sample_id] if sample_id != 1 else None  # that of sample 1 is not there yet

    def restore_outcomes(self, sample_id: int, response: Any, saved: Any) -> None:
        assert saved == [sample_id]
        self.outcomes[(sample_id, *response)] = saved


def test_a_resumed_run_scores_what_had_no_score(make_role, tmp_path):
    role = make_role(scorer=Started())
    role.add(prompts_of(0), SEED)
    run_slices(role, None)
    role.save_ahead(tmp_path, 0)
    scorer: Any = Started()
    resumed = make_role(scorer=scorer)
    resumed.load_ahead(tmp_path)
    resumed.add(prompts_of(0), SEED)
    assert len(resumed.advance(None).report.ended) == 2
    assert scorer.started == [1]
