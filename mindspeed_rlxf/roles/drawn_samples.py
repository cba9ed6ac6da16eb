"""The samples that a rank generates, from `add` until they are trained or dropped."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from mindspeed_rlxf.data.agent_record import AgentRecord
from mindspeed_rlxf.data.batch import Prompts
from mindspeed_rlxf.rollout.ahead import SavedResponse
from mindspeed_rlxf.rollout.rollout_engine import Begun, GenerationRequest, GenerationResult
from mindspeed_rlxf.rollout.sampling import Sampling, SamplingSettings

Key = tuple[int, Sampling]  # sample id, and how its tokens are chosen


@dataclass
class DrawnSample:
    """A sample, and what is sampled of its response.

    Attributes:
        prompt: One row.
        request: With the part of the response that had begun when the engine got it.
        agent: Name of the agent that leads its conversation; "" = none, the response is one turn.
        result: None while the response has not ended.
        record: What the agent has left, once the conversation has ended; `prompt` has it too.
    """

    prompt: Prompts
    sampling: Sampling
    request: GenerationRequest
    agent: str = ""
    result: GenerationResult | None = None
    record: AgentRecord | None = None

    @property
    def key(self) -> Key:
        """Identity within a run."""
        return self.request.sample_id, self.sampling

    @property
    def order(self) -> tuple[int, bool]:
        """Position in the stream; a greedy response follows the prompt's first sample."""
        return self.request.sample_id, self.sampling is Sampling.GREEDY

    @property
    def fixed_response(self) -> list[int]:
        """Tokens used instead of generating; [] = none."""
        tokens: list[int] = self.prompt.responses[0]
        return tokens

    @property
    def saved_response(self) -> SavedResponse | None:
        """What a resumed run goes on with; None if nothing is sampled."""
        if self.result is not None:
            result = self.result
            begun = Begun(result.tokens, result.log_probs, result.token_versions)
            reason = result.finish_reason
            return SavedResponse.of(begun, reason, result.trained, self.record)
        if self.agent:  # a resumed run begins its conversation again
            return None
        begun_before = self.request.begun
        return None if begun_before is None else SavedResponse.of(begun_before, None)


class DrawnSamples:
    """All samples that a rank knows, and which of them its engine has.

    The engine gets samples in the order of the stream, whenever they were added. So a resumed run,
    which adds all of them at once, generates as the run before it.

    Attributes:
        saved: Responses of an earlier run, for samples that are added later.
    """

    def __init__(self) -> None:
        self.saved: dict[Key, SavedResponse] = {}
        self._samples: dict[Key, DrawnSample] = {}
        self._waiting: list[DrawnSample] = []  # unfinished, and not in the engine
        self._in_engine: dict[int, DrawnSample] = {}  # by the place of the request
        self._unstarted: list[DrawnSample] = []  # whose agents have not been started
        self._with_agents: dict[Key, DrawnSample] = {}  # whose agents do not ask for a turn
        self._ended_before: list[DrawnSample] = []  # in an earlier run, and not reported yet
        self._num_added = 0

    def __getitem__(self, key: Key) -> DrawnSample:
        """Return a sample. Raises KeyError for an unknown one."""
        return self._samples[key]

    @property
    def known(self) -> list[DrawnSample]:
        """All samples, in the order of the stream."""
        return sorted(self._samples.values(), key=lambda sample: sample.order)

    @property
    def num_unfinished(self) -> int:
        """Number of samples whose response has not ended."""
        in_conversations = len(self._unstarted) + len(self._with_agents)
        return len(self._waiting) + len(self._in_engine) + in_conversations

    @property
    def are_withdrawn(self) -> bool:
        """Whether the engine has none."""
        return not self._in_engine

    def add(
        self,
        prompts: Prompts,
        sampling: Sampling,
        settings: SamplingSettings,
        seed: int,
        agents: Sequence[str] | None = None,
    ) -> None:
        """Add a sample for each row, with what `saved` has of its response.

        `agents` has the name of each row's agent, "" for none; None = none for all.
        """
        for row, sample_id in enumerate(prompts.sample_ids):
            agent = agents[row] if agents is not None else ""
            request = GenerationRequest(
                self._num_added,
                sample_id,
                prompts.token_ids[row],
                settings,
                seed,
                is_turn=bool(agent),
            )
            self._num_added += 1
            sample = DrawnSample(prompts.select([row]), sampling, request, agent)
            assert sample.key not in self._samples, f"sample {sample_id} was added twice"
            self._samples[sample.key] = sample
            response = self.saved.pop(sample.key, None)
            if response is None:
                (self._unstarted if agent else self._waiting).append(sample)
            elif response.finish_reason is None:
                assert not agent, f"the conversation of sample {sample_id} was not saved"
                sample.request = replace(request, begun=response.begun)
                self._waiting.append(sample)
            else:
                begun = response.begun
                sample.result = GenerationResult(
                    request.place,
                    begun.tokens,
                    begun.log_probs,
                    response.finish_reason,
                    begun.versions[-1],
                    begun.versions,
                    response.trained,
                )
                if response.record is not None:
                    _set_record(sample, response.record)
                self._ended_before.append(sample)

    def pop_ended_before(self) -> list[DrawnSample]:
        """Return the samples that ended in an earlier run and were added since the last call."""
        samples, self._ended_before = self._ended_before, []
        return samples

    def enter_engine(self) -> list[DrawnSample]:
        """Return the samples that the engine gets now, in the order of the stream."""
        entering = sorted(self._waiting, key=lambda sample: sample.order)
        self._waiting = []
        self._in_engine |= {sample.request.place: sample for sample in entering}
        return entering

    def end(self, result: GenerationResult) -> DrawnSample:
        """Return the sample in the engine whose response this is; it has ended."""
        sample = self._in_engine.pop(result.place)
        sample.result = result
        return sample

    def pop_unstarted(self, limit: int | None) -> list[DrawnSample]:
        """Return at most `limit` samples whose agents start now, in the order of the stream."""
        unstarted = sorted(self._unstarted, key=lambda sample: sample.order)
        starting = unstarted[:limit]
        self._unstarted = unstarted[len(starting) :]
        self._with_agents |= {sample.key: sample for sample in starting}
        return starting

    def is_led(self, result: GenerationResult) -> bool:
        """Whether a result of the engine is a turn, for an agent to answer."""
        return self._in_engine[result.place].agent != ""

    def end_turn(self, result: GenerationResult) -> DrawnSample:
        """Return the sample in the engine whose turn this is; its agent answers it."""
        sample = self._in_engine.pop(result.place)
        self._with_agents[sample.key] = sample
        return sample

    def go_on(self, request: GenerationRequest, sampling: Sampling) -> None:
        """Have a sample's next turn enter the engine."""
        sample = self._with_agents.pop((request.sample_id, sampling))
        sample.request = request
        self._waiting.append(sample)

    def end_conversation(
        self, key: Key, result: GenerationResult, record: AgentRecord
    ) -> DrawnSample:
        """Return the sample whose agent has ended its conversation."""
        sample = self._with_agents.pop(key)
        sample.result = result
        _set_record(sample, record)
        return sample

    def leave_engine(self, requests: Sequence[GenerationRequest]) -> None:
        """Take back all samples in the engine, with their parts."""
        for request in requests:
            sample = self._in_engine.pop(request.place)
            sample.request = request
            self._waiting.append(sample)
        assert self.are_withdrawn, "the engine returns all unfinished requests"

    def forget(self, sample_ids: Sequence[int]) -> None:
        """Forget ended samples and their greedy responses; unknown ids are ignored."""
        for sample_id in sample_ids:
            for sampling in Sampling:
                self.saved.pop((sample_id, sampling), None)
                sample = self._samples.pop((sample_id, sampling), None)
                has_ended = sample is None or sample.result is not None
                assert has_ended, f"sample {sample_id} is forgotten, but its response goes on"


def _set_record(sample: DrawnSample, record: AgentRecord) -> None:
    """Note a conversation's record, also as a column of the sample's row."""
    sample.record = record
    columns = record.add_to(sample.prompt.extra_infos[0])
    sample.prompt = replace(sample.prompt, extra_infos=[columns])
