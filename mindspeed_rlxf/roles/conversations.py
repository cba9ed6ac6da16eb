"""The conversations of a rank's samples that an agent leads, slice by slice.

A slice first starts the agents of new samples. What a turn's agent answers is read at the end of
the slice `rollout.agent_lag` slices after the one that ended the turn, and enters the engine in the
next slice. So what enters when depends on slices alone, never on how long agents take.

Agents run on the replica's leader. The other ranks of its tensor-parallel group get what agents
have decided by a broadcast.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, TypeAlias

from mindspeed_rlxf.agents.conversation import ChatTemplate
from mindspeed_rlxf.agents.dialect import Dialect
from mindspeed_rlxf.agents.gateway import close_gateway, open_gateway
from mindspeed_rlxf.agents.live_session import Ask, LiveSession, Move, RowLimits
from mindspeed_rlxf.agents.loop import AgentLoop
from mindspeed_rlxf.agents.programs import open_programs
from mindspeed_rlxf.agents.session import AGENTS, GIVES_FIRST, Agent
from mindspeed_rlxf.agents.tools import open_tools
from mindspeed_rlxf.config.schema import RunConfig
from mindspeed_rlxf.data.agent_record import AgentRecord
from mindspeed_rlxf.data.batch import Prompts
from mindspeed_rlxf.data.decoding import RewardTexts
from mindspeed_rlxf.data.template_dates import template_arguments
from mindspeed_rlxf.data.tokenizer import load_tokenizer
from mindspeed_rlxf.roles.drawn_samples import DrawnSample, DrawnSamples, Key
from mindspeed_rlxf.rollout.rollout_engine import (
    EngineLost,
    GenerationResult,
    GenerationStats,
    StepwiseEngine,
)
from mindspeed_rlxf.rollout.sampling import Sampling, SamplingSettings, attempt_seed

if TYPE_CHECKING:
    from mindspeed_rlxf.rollout.replica import Replica  # brings in Megatron

Decision: TypeAlias = Ask | tuple[GenerationResult, AgentRecord]
"""What an agent has decided: the next turn, or the end of its sample."""


class AgentHost:
    """A rank's agents, and on the replica's leader the event loop that runs them.

    Attributes:
        agreement: With the other ranks of the replica, and those that share experts.
        server_has_failed: See `Replica`.
    """

    def __init__(self, config: RunConfig, eos_token_ids: Sequence[int], replica: Replica) -> None:
        """Start the loop, and open the tools, on a leader."""
        self.rollout = config.rollout
        self.is_leader, self.agreement = replica.is_leader, replica.agreement
        self.server_has_failed = replica.server_has_failed
        self._eos_token_ids = tuple(eos_token_ids)
        self._agents: dict[str, Agent] = {}
        self._dialects: dict[bool, Dialect] = {}  # whether for chats
        self.loop: AgentLoop | None = None
        if self.is_leader:
            self._dialects = _make_dialects(config, self._eos_token_ids)
            self.loop = AgentLoop(config.rollout.turn_timeout_s)

    def choose(self, prompts: Prompts) -> list[str]:
        """Return the name of each row's agent; "" for none, as for a fixed response."""
        names = [self.rollout.agent_of(extra_info) for extra_info in prompts.extra_infos]
        fixed = [bool(response) for response in prompts.responses]
        return ["" if is_fixed else name for name, is_fixed in zip(names, fixed, strict=True)]

    def start(self, sample: DrawnSample) -> LiveSession:
        """Start the agent of a sample; on leaders."""
        assert self.loop is not None, "sessions live on the leader"
        row, request = sample.prompt, sample.request
        limits = RowLimits(
            request.settings.max_new_tokens, self.rollout.max_turns, self._eos_token_ids
        )
        session = LiveSession(
            request.sample_id,
            sample.agent,
            request.prompt.tolist(),
            row.messages[0],
            dict(row.extra_infos[0]),
            row.ground_truths[0],
            limits,
            self._dialects[bool(row.messages[0])],
            self.loop.note_ask,
            sample.agent in GIVES_FIRST,
        )
        self.loop.start(session, self._find_agent(sample.agent))
        return session

    def _find_agent(self, name: str) -> Agent:
        """Return the process's agent of a name, which is made when it is first needed."""
        if name not in self._agents:
            self._agents[name] = AGENTS[name]()
        return self._agents[name]


def _make_dialects(config: RunConfig, eos_token_ids: Sequence[int]) -> dict[bool, Dialect]:
    """Open tools, gateway and programs; return the dialects of text prompts and of chats."""
    tokenizer, data = load_tokenizer(config.training.tokenizer_name_or_path), config.data
    schemas = open_tools(config.rollout, config.reward).schemas
    close_gateway()
    if config.rollout.opens_gateway:
        tools = [schema["function"]["name"] for schema in schemas]
        open_gateway(config.rollout.gateway_host, config.actor_rollout.stop_strings, tools)
    open_programs(config.rollout)
    template = ChatTemplate(
        tokenizer,
        eos_token_ids,
        schemas,
        template_kwargs=template_arguments(tokenizer, data),
        allow_special_tokens=data.allow_special_tokens,
    )
    texts = RewardTexts(tokenizer, config.actor_rollout.stop_strings)
    return {is_chat: Dialect(template, texts, schemas, is_chat) for is_chat in (False, True)}


@dataclass
class Conversation:
    """A sample's conversation on a rank.

    Attributes:
        session: None beside the leader.
        seed: Of the run.
        due: Slice at whose end the agent's decision is read; None while a turn is sampled.
    """

    session: LiveSession | None
    seed: int
    due: int | None = None


class Conversations:
    """The conversations of the samples in `samples`."""

    def __init__(self, host: AgentHost, samples: DrawnSamples) -> None:
        """Begin without conversations; those of `samples` that have an agent are led here."""
        self._host, self._samples = host, samples
        self._conversations: dict[Key, Conversation] = {}
        self._slice = 0  # number of the current one

    def run_slice(self, engine: StepwiseEngine, steps: int | None) -> Iterator[DrawnSample]:
        """Generate for at most `steps` decode steps; yield the samples that have ended."""
        version = engine.weights_version
        yield from self._start(version)
        engine.add([sample.request for sample in self._samples.enter_engine()])
        for result in engine.advance(steps):
            if self._samples.is_led(result):
                self._end_turn(result)
            else:
                yield self._samples.end(result)
        yield from self._end_slice(version)

    def _start(self, version: int) -> list[DrawnSample]:
        """Start the agents of new samples, and wait for their first decisions.

        Returns the samples that end before their first turn, as rows of `version`.
        """
        limit = self._host.rollout.max_conversations
        room = None if limit is None else max(0, limit - len(self._conversations))
        new = self._samples.pop_unstarted(room)
        for sample in new:
            session = self._host.start(sample) if self._host.is_leader else None
            self._conversations[sample.key] = Conversation(session, sample.request.seed)
        return self._read_decisions([sample.key for sample in new], version)

    def _end_turn(self, result: GenerationResult) -> None:
        """Give an ended turn to its agent."""
        sample = self._samples.end_turn(result)
        conversation = self._conversations[sample.key]
        conversation.due = self._slice + self._host.rollout.agent_lag
        if conversation.session is not None:
            assert self._host.loop is not None
            self._host.loop.deliver(conversation.session, result)

    def _end_slice(self, version: int) -> list[DrawnSample]:
        """Read the decisions that are due; return the samples that have ended."""
        due = [
            key
            for key, conversation in self._conversations.items()
            if conversation.due is not None and conversation.due <= self._slice
        ]
        self._slice += 1
        return self._read_decisions(due, version)

    def _read_decisions(self, keys: list[Key], version: int) -> list[DrawnSample]:
        """Wait for the agents' decisions, and apply them on all ranks of the replica."""
        if not keys:
            return []
        decisions: list[Decision] = []
        if self._host.loop is not None:
            sessions = [self._conversations[key].session for key in keys]
            live = [session for session in sessions if session is not None]
            self._host.loop.wait(live)
            for key, session in zip(keys, live, strict=True):
                if session.move is Move.POLICY:
                    decisions.append(session.ask)
                else:
                    decisions.append(session.finish(self._samples[key].request.place, version))
        decisions = self._host.agreement.share(decisions)
        ended = []
        for key, decision in zip(keys, decisions, strict=True):
            if isinstance(decision, Ask):
                self._go_on(key, decision)
            else:
                del self._conversations[key]
                ended.append(self._samples.end_conversation(key, *decision))
        return ended

    def _go_on(self, key: Key, ask: Ask) -> None:
        conversation, sample = self._conversations[key], self._samples[key]
        conversation.due = None
        settings = replace(sample.request.settings, max_new_tokens=ask.limit)
        turn_start = len(ask.begun.tokens) if ask.begun is not None else 0
        request = replace(
            sample.request,
            settings=settings,
            seed=attempt_seed(conversation.seed, ask.attempt),
            begun=ask.begun,
            turn_start=turn_start,
        )
        self._samples.go_on(request, sample.sampling)


def generate_conversations(
    host: AgentHost,
    engine: StepwiseEngine,
    prompts: Prompts,
    sampling: Sampling,
    settings: SamplingSettings,
    seed: int,
) -> tuple[Prompts, list[GenerationResult], GenerationStats]:
    """Lead a conversation for each prompt to its end, while nothing else is in the engine.

    Returns the prompts with their agents' records, a result for each in this order, and counts. A
    sample id that several rows have is of the same prompt, and led once.

    Raises EngineLost if the engine's server fails.
    """
    samples = DrawnSamples()
    row_of = {sample_id: row for row, sample_id in enumerate(prompts.sample_ids)}
    distinct = prompts.select(list(row_of.values()))
    samples.add(distinct, sampling, settings, seed, host.choose(distinct))
    conversations = Conversations(host, samples)
    stats = GenerationStats()
    while host.agreement.is_any_left(samples.num_unfinished):
        for _ in conversations.run_slice(engine, host.rollout.slice_steps):
            pass
        if host.server_has_failed():
            raise EngineLost("the server failed amid conversations; see its log")
        stats += engine.stats()
    ended = [samples[sample_id, sampling] for sample_id in prompts.sample_ids]
    results = []
    for row, sample in enumerate(ended):
        assert sample.result is not None, "nothing is left"
        results.append(replace(sample.result, place=row))
    rows = Prompts.concat([sample.prompt for sample in ended]) if ended else prompts
    return rows, results, stats
