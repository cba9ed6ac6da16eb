"""Samples that agents lead, in slices of the native engine: what enters when, and how rows end."""

import asyncio
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any
from urllib.parse import urlsplit

import pytest

from mindspeed_rlxf.agents.gateway import open_endpoint
from mindspeed_rlxf.agents.session import AGENTS
from mindspeed_rlxf.config.generation_memory import Capacities
from mindspeed_rlxf.config.schema import (
    ActorConfig,
    DataConfig,
    RewardConfig,
    RolloutConfig,
    ValidationConfig,
)
from mindspeed_rlxf.data.agent_record import find_record
from mindspeed_rlxf.data.batch import Prompts
from mindspeed_rlxf.roles.rollout import RolloutRole, Sampling
from mindspeed_rlxf.rollout import replica as replicas
from mindspeed_rlxf.rollout.rollout_engine import (
    EngineLost,
    FinishReason,
    GenerationRequest,
    GenerationResult,
    GenerationStats,
)
from tests.golden.runs import START
from tests.unit.agents.served import Client
from tests.unit.roles.test_slices import prompts_of, run_slices, same_rows
from tests.unit.rollout.conftest import whole_model_decodes
from tests.unit.rollout.test_native import EOS, TinyModel, engine

__all__ = ["whole_model_decodes"]  # a fixture
LONGEST, SEED, TIMEOUT_S = 12, 5, 1.0


class OneTurn:
    async def run(self, session: Any) -> None:
        await session.say()


class Talk:
    """Several turns with observations between them, after a delay that depends on the sample."""

    def __init__(self, delay_s: float = 0.0) -> None:
        self.delay_s = delay_s

    async def run(self, session: Any) -> None:
        await asyncio.sleep(self.delay_s * (session.sample_id % 3))
        for number in range(1 + session.sample_id % 3):
            turn = await session.say(3)
            await asyncio.sleep(self.delay_s * ((session.sample_id + number) % 4))
            session.reward(float(len(turn.token_ids)))
            session.give([{"role": "user", "content": "12"}])
        await asyncio.sleep(self.delay_s)


class FailsForOdd:
    """Raises before the first turn of sample 1, and after that of sample 3."""

    async def run(self, session: Any) -> None:
        if session.sample_id == 1:
            raise OSError("no database")
        await session.say()
        if session.sample_id == 3:
            raise OSError("no database")


@pytest.fixture
def make_role(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    def make(
        leads: Any, whole: Any = None, has_failed: Callable[[], bool] = bool, **keys: Any
    ) -> RolloutRole:
        native = engine(TinyModel(), 3, capacities=Capacities(8, LONGEST, 8))
        rollout = whole or native
        replica = replicas.Replica(
            rollout, lambda *_: None, is_leader=True, server_has_failed=has_failed
        )
        monkeypatch.setattr(replicas, "build_replica", lambda *_: replica)
        monkeypatch.setitem(AGENTS, "test", lambda: leads)
        return RolloutRole(config(leads is not None, **keys), [EOS])

    yield make


def config(has_agent: bool, **keys: Any) -> Any:
    named: dict[str, Any] = {"agent": "test"} if has_agent else {}
    return SimpleNamespace(
        actor_rollout=ActorConfig.model_construct(
            max_new_tokens=LONGEST, temperature=2.0, do_sample=True, n_samples_per_prompt=2
        ),
        validation=ValidationConfig(do_sample=True, temperature=2.0),
        rollout=RolloutConfig(**named | {"slice_steps": 2, "turn_timeout_s": TIMEOUT_S} | keys),
        data=DataConfig(train_files=("none",)),
        reward=RewardConfig.model_construct(),
        training=SimpleNamespace(tokenizer_name_or_path=str(START)),
        rollout_tp=1,
        rollout_ep=1,
        train_rollout_split=None,
    )


def generate(role: RolloutRole, prompts: Prompts, steps: int | None = 2) -> tuple[Any, Any]:
    """Add and generate all samples in slices; return the output and the slices' reports."""
    role.add(prompts, SEED)
    reports = run_slices(role, steps, most=80)
    return role.take(prompts.sample_ids), reports


def test_an_agent_of_one_turn_gives_the_rows_of_no_agent(make_role: Any) -> None:
    prompts = prompts_of(0, 1, 2, 3)
    output, reports = generate(make_role(OneTurn()), prompts)
    whole, _ = generate(make_role(None), prompts)
    ours, theirs = output.rows, whole.rows
    for name in ("response_ids", "rollout_log_probs", "trained_mask", "has_eos", "weights_version"):
        assert getattr(ours, name).equal(getattr(theirs, name)), name
    assert [len(record.turns) for record in output.report.records] == [1] * 8
    lengths = {r.sample_id: r.response_length for report in reports for r in report.ended}
    assert [lengths[i] for i in prompts.sample_ids] == output.report.response_lengths


@pytest.mark.parametrize("lag", [0, 1, 2])
def test_delays_of_agents_change_neither_rows_nor_slices(make_role: Any, lag: int) -> None:
    prompts = prompts_of(0, 1, 2, 3)
    output, reports = generate(make_role(Talk(), agent_lag=lag), prompts)
    late, late_reports = generate(make_role(Talk(0.03), agent_lag=lag), prompts)
    assert late_reports == reports
    for name in ("response_ids", "rollout_log_probs", "trained_mask", "weights_version"):
        assert getattr(late.rows, name).equal(getattr(output.rows, name)), name
    records = [find_record(extra_info) for extra_info in output.rows.extra_infos]
    assert [len(record.turns) for record in records if record] == [1, 2, 3, 1, 2, 3, 1, 2]
    for row, record in enumerate(records):
        trained = output.rows.trained_mask[row].tolist()
        assert record is not None and record.score == sum(trained)
        for (_, end), (start, _) in zip(record.turns, record.turns[1:], strict=False):
            assert output.rows.response_ids[row, end:start].tolist() == [4, 5], "the ids of `12`"
            assert not any(trained[end:start])


class TakesBack:
    """Samples its second turn twice, and says nothing of the first try."""

    def __init__(self) -> None:
        self.dropped: dict[int, list[int]] = {}

    async def run(self, session: Any) -> None:
        await session.say(3)
        session.give([{"role": "user", "content": "12"}])
        self.dropped[session.sample_id] = (await session.say(4)).token_ids
        session.reward(1.0, form=1.0)
        session.take_back()
        session.give([{"role": "user", "content": "12"}])
        await session.say(4)
        session.reward(1.0, form=1.0)


def test_a_turn_that_is_taken_back_is_sampled_by_other_random_numbers(make_role: Any) -> None:
    agent = TakesBack()
    output, _ = generate(make_role(agent), prompts_of(0, 1, 2))
    again, _ = generate(make_role(TakesBack()), prompts_of(0, 1, 2))
    same_rows(output.rows, again.rows)
    responses = output.rows.response_tokens()
    differ = []
    for sample_id, record in enumerate(output.report.records):
        assert len(record.turns) == 2
        assert record.score == 1.0 and record.parts == {"form": 1.0}
        start, end = record.turns[1]
        differ.append(responses[sample_id][start:end] != agent.dropped[sample_id])
    assert sum(differ) > len(differ) / 2


@pytest.mark.parametrize("agent", [Talk(), TakesBack()], ids=["talks", "takes back"])
def test_log_probs_of_turns_are_those_of_the_complete_row(make_role: Any, agent: Any) -> None:
    """Each turn continues from all that is before it, observations included."""
    prompts = prompts_of(0, 1, 2)
    role = make_role(agent)
    rows = generate(role, prompts)[0].rows
    scored = role.replica.engine.score(
        [*prompts.token_ids], rows.response_tokens(), role.settings[Sampling.TRAINING].temperature
    )
    for row, log_probs in enumerate(scored):
        for token, log_prob in enumerate(log_probs):
            expected = log_prob if rows.trained_mask[row, token] else 0.0
            found = rows.rollout_log_probs[row, token].item()
            assert found == pytest.approx(expected, abs=1e-5)


def test_a_sample_whose_agent_fails_is_masked_and_named(make_role: Any) -> None:
    output, _ = generate(make_role(FailsForOdd()), prompts_of(0, 1))
    failures = output.report.agent_failures
    failed = {failure.sample_id: failure for failure in failures if failure is not None}
    assert failed.keys() == {1, 3} and failures[1] is failed[1]
    assert all(f.cause == "agent_exception" and f.is_outside for f in failed.values())
    assert "no database" in failed[1].message and "raise OSError" in failed[3].details
    trained = output.rows.trained_mask.any(1).tolist()
    assert trained == [True, False, True, False]
    assert output.rows.response_tokens()[1] == [EOS] and not output.rows.has_eos[1]


def test_samples_without_an_agent_are_generated_beside_conversations(make_role: Any) -> None:
    prompts = prompts_of(0, 1)
    columns: list[dict[str, Any]] = [{"agent_name": "test"} if i % 2 else {} for i in range(4)]
    both = replace(prompts, extra_infos=columns)
    output, _ = generate(make_role(Talk(), agent="by_row"), both)
    assert [record is not None for record in output.report.records] == [False, True] * 2
    alone, _ = generate(make_role(None), prompts)
    same_rows(output.rows.select([0, 2]), alone.rows.select([0, 2]))


def test_conversations_of_a_validation_are_led_in_one_call(make_role: Any) -> None:
    """While the role knows samples of the same ids, of training."""
    prompts = prompts_of(0, 1, 2)
    role = make_role(Talk())
    role.add(prompts, SEED)
    run_slices(role, 2, most=80)
    once: Any = role.generate(prompts, SEED + 1, Sampling.VALIDATION)
    sliced = make_role(Talk())
    sliced.add(prompts, SEED + 1, Sampling.VALIDATION)
    run_slices(sliced, 2, most=80)
    taken: Any = sliced.take(prompts.sample_ids, Sampling.VALIDATION)
    same_rows(once.rows, taken.rows)
    assert once.report.records == taken.report.records
    assert once.report.sampled_tokens == taken.report.sampled_tokens > 0
    repeated = [*range(6), 0, 1]  # so that the replicas of a reward model have equally many
    padded: Any = make_role(Talk()).generate(
        prompts.select(repeated), SEED + 1, Sampling.VALIDATION
    )
    assert padded.rows.response_tokens() == once.rows.select(repeated).response_tokens()


class OneToken:
    """Each turn is the token 7. With `has_failed` it answers one request of a slice."""

    weights_version = 0

    def __init__(self) -> None:
        self.has_failed = False
        self.requests: list[GenerationRequest] = []

    def wake(self) -> None: ...

    def add(self, requests: Sequence[GenerationRequest]) -> None:
        self.requests += requests

    def advance(self, _steps: int) -> Iterator[GenerationResult]:
        while self.requests:
            request = self.requests.pop(0)
            tokens = [*(request.begun.tokens if request.begun else []), 7]
            log_probs = [0.0] * len(tokens)
            yield GenerationResult(request.place, tokens, log_probs, FinishReason.STOP, 0)
            if self.has_failed:
                return

    def withdraw(self) -> list[GenerationRequest]:
        requests, self.requests = self.requests, []
        return requests

    def stats(self) -> GenerationStats:
        return GenerationStats()


def make_failed(make_role: Any, prompts: Prompts) -> tuple[Any, OneToken]:
    """Return a role whose server fails amid conversations, and its engine."""
    flaky = OneToken()
    role = make_role(Talk(), flaky, lambda: flaky.has_failed)
    role.add(prompts, SEED)
    role.advance(2)
    flaky.has_failed = True
    assert role.advance(2).report.server_has_failed
    return role, flaky


def test_conversations_go_on_after_a_failure_of_the_server(make_role: Any) -> None:
    prompts = prompts_of(0, 1, 2)
    role, flaky = make_failed(make_role, prompts)
    role.withdraw()
    role.update_weights(0, with_base=True)
    flaky.has_failed = False
    run_slices(role, 2, most=80)
    whole, _ = generate(make_role(Talk(), OneToken()), prompts)
    same_rows(role.take(prompts.sample_ids).rows, whole.rows)
    flaky.has_failed = True
    with pytest.raises(EngineLost):
        role.generate(prompts, SEED + 1, Sampling.VALIDATION)


def test_a_conversation_that_a_failed_server_left_is_led_anew_by_a_resumed_run(
    make_role: Any, tmp_path: Any
) -> None:
    prompts = prompts_of(0, 1, 2)
    role, _ = make_failed(make_role, prompts)
    role.save_ahead(tmp_path, 0)
    resumed = make_role(Talk(), OneToken())
    resumed.load_ahead(tmp_path)
    resumed.add(prompts, SEED)
    run_slices(resumed, 2, most=80)
    whole, _ = generate(make_role(Talk(), OneToken()), prompts)
    same_rows(resumed.take(prompts.sample_ids).rows, whole.rows)


def test_a_conversation_goes_on_after_the_engine_has_left_the_device(make_role: Any) -> None:
    prompts = prompts_of(0, 1, 2)
    whole, _ = generate(make_role(Talk()), prompts, 1)
    role = make_role(Talk())
    role.add(prompts, SEED)
    unfinished = 1
    while unfinished:
        unfinished = role.advance(1).report.unfinished
        role.leave_device()
    same_rows(role.take(prompts.sample_ids).rows, whole.rows)


@pytest.mark.parametrize("agent", [Talk(), FailsForOdd()])
def test_ended_conversations_are_saved_with_their_masks_and_records(
    make_role: Any, tmp_path: Any, agent: Any
) -> None:
    prompts = prompts_of(0, 1)
    role = make_role(agent)
    output, _ = generate(role, prompts)
    role.save_ahead(tmp_path, 0)
    resumed = make_role(OneTurn())
    resumed.load_ahead(tmp_path)
    resumed.add(prompts, SEED)
    run_slices(resumed, 2)
    taken: Any = resumed.take(prompts.sample_ids)
    for name in ("response_ids", "rollout_log_probs", "trained_mask", "has_eos", "weights_version"):
        assert getattr(taken.rows, name).equal(getattr(output.rows, name)), name
    assert taken.rows.extra_infos == output.rows.extra_infos
    assert taken.report.records == output.report.records
    assert taken.report.agent_failures == output.report.agent_failures


class TimedEngine:
    """An engine in which time is decode steps: a turn takes as many as its sample id says."""

    weights_version = 0

    def __init__(self) -> None:
        self.step = 0
        self.requests: list[tuple[int, GenerationRequest]] = []  # (last step, request)
        self.ended_at: dict[int, int] = {}  # sample id -> step at which its last turn ended
        self.alarms: list[tuple[int, Callable[[], Any]]] = []  # (step, what happens then)

    def wake(self) -> None: ...

    def stats(self) -> GenerationStats:
        return GenerationStats()

    def add(self, requests: Sequence[GenerationRequest]) -> None:
        self.requests += [(self.step + 1 + each.sample_id % 7, each) for each in requests]

    def at(self, step: int, alarm: Callable[[], Any]) -> None:
        """Call `alarm` at this step, or now if it is over; perhaps twice."""
        self.alarms.append((step, alarm))
        self.ring()

    def ring(self) -> None:
        for step, alarm in list(self.alarms):
            if step <= self.step:
                alarm()

    def advance(self, steps: int) -> Iterator[GenerationResult]:
        for _ in range(steps):
            self.step += 1
            self.ring()
            for step, request in self.requests:
                if step == self.step:
                    self.ended_at[request.sample_id] = step
                    tokens = [*(request.begun.tokens if request.begun else []), 7]
                    reason = FinishReason.LENGTH
                    log_probs = [0.0] * len(tokens)
                    yield GenerationResult(request.place, tokens, log_probs, reason, 0)


class Asks:
    """Two turns; a tool answers sample 5 after `tool_steps`, all others at once."""

    def __init__(self, timed: TimedEngine, tool_steps: int) -> None:
        self.timed, self.tool_steps = timed, tool_steps

    async def run(self, session: Any) -> None:
        await session.say()
        if session.sample_id == 5:
            answered = asyncio.Event()
            ring = partial(asyncio.get_running_loop().call_soon_threadsafe, answered.set)
            self.timed.at(self.timed.ended_at[5] + self.tool_steps, ring)
            await answered.wait()
        session.give([{"role": "tool", "content": "3"}])
        await session.say()


def test_a_tool_that_takes_a_slice_is_not_waited_for(make_role: Any) -> None:
    """Were a conversation waited for in the slice of its turn, the tool would never answer.

    Time goes on in the engine alone: a slice of 8 steps is the second that the tool takes.
    """
    ends = {}
    for tool_steps in (0, 8):
        timed = TimedEngine()
        role = make_role(Asks(timed, tool_steps), whole=timed, slice_steps=8)
        role.add(prompts_of(*range(16)), SEED)
        reports = run_slices(role, 8)
        ends[tool_steps] = [[r.sample_id for r in report.ended] for report in reports]
        taken: Any = role.take([*range(32)])
        assert not any(taken.report.agent_failures), "the tool was waited for in vain"
        assert sum(map(len, ends[tool_steps])) == 32
    assert ends[8] == ends[0], "the others end in the slices in which they end without it"


def test_ranks_beside_the_leader_follow_what_it_broadcasts(make_role: Any) -> None:
    """They run no agent, and give their engine the same requests in the same slices."""
    prompts = prompts_of(0, 1, 2)
    sent: list[Any] = []
    leader = make_role(Talk())
    leader.agents.agreement.share = lambda decisions: sent.append(decisions) or decisions
    output, _ = generate(leader, prompts)
    follower = make_role(Talk())
    follower.agents.agreement.share = lambda decisions: decisions or sent.pop(0)
    follower.agents.is_leader, follower.agents.loop = False, None
    follower.add(prompts, SEED)
    while follower.samples.num_unfinished:
        follower.advance(2)
    rows = follower.take(prompts.sample_ids).rows
    assert rows.response_ids.equal(output.rows.response_ids)
    assert rows.trained_mask.equal(output.rows.trained_mask) and not sent


class OpensEndpoint:
    """Notes where the gateway listens, and that it takes a turn's request."""

    def __init__(self) -> None:
        self.hosts: set[str | None] = set()

    async def run(self, session: Any) -> None:
        async with open_endpoint(session) as endpoint:
            self.hosts.add(urlsplit(endpoint.base_url).hostname)
            client = Client(endpoint.base_url, endpoint.api_key)
            await asyncio.to_thread(client.say, endpoint.messages)


def test_an_agent_opens_an_endpoint_where_the_run_has_a_gateway(make_role: Any) -> None:
    prompts = prompts_of(0, 1)
    one_turn, _ = generate(make_role(OneTurn()), prompts)
    for host in ("127.0.0.1", "127.0.0.2"):
        agent = OpensEndpoint()
        output, _ = generate(make_role(agent, gateway=True, gateway_host=host), prompts)
        same_rows(output.rows, one_turn.rows)
        assert agent.hosts == {host}
    without, _ = generate(make_role(OpensEndpoint()), prompts)
    assert all("rollout.gateway" in r.failure.message for r in without.report.records)


class TalksOn:
    """Talks until it is stopped; the last sample hangs after its first turn."""

    async def run(self, session: Any) -> None:
        while True:
            await session.say(1)
            if session.sample_id == 3:
                await asyncio.sleep(100)


def test_the_configuration_ends_conversations(make_role: Any) -> None:
    keys = {"max_turns": 4, "turn_timeout_s": 0.3}
    output, _ = generate(make_role(TalksOn(), **keys), prompts_of(0, 1))
    records = output.report.records
    assert [len(record.turns) for record in records] == [4, 4, 4, 1]
    assert [record.failure and record.failure.cause for record in records] == [
        None,
        None,
        None,
        "timeout",
    ]
    assert not output.rows.has_eos.any()
