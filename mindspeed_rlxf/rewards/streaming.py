"""Score samples one by one, while others are still generated."""

from __future__ import annotations

from concurrent.futures import Future
from dataclasses import dataclass

from mindspeed_rlxf.config.schema import RewardConfig
from mindspeed_rlxf.data.prompt_store import reward_style
from mindspeed_rlxf.rewards.outcome import Outcome, Sample
from mindspeed_rlxf.rewards.plans import make_plan
from mindspeed_rlxf.rewards.remote import RemoteRewards
from mindspeed_rlxf.rewards.rules import RewardResult
from mindspeed_rlxf.rewards.scorer import weighted_sum
from mindspeed_rlxf.rewards.workers import WorkerPool


@dataclass(frozen=True)
class Scoring:
    """The scoring of one sample, in progress.

    own:    outcome of this host's processes, weighted already; None = they do not score the sample
    remote: (name, weight, outcome) of each server
    """

    own: Future[Outcome] | None
    remote: list[tuple[str, float, Future[Outcome]]]

    def outcome(self) -> Outcome:
        """Wait for all outcomes, and return their weighted sum, or the first failure.

        Raises:
            ScoringBroken: the scoring processes cannot score any sample.
        """
        own = self.own.result() if self.own else Outcome(RewardResult(0.0))
        others = [(name, weight, future.result()) for name, weight, future in self.remote]
        for outcome in (own, *(outcome for _, _, outcome in others)):
            if outcome.result is None:
                return outcome
        assert own.result is not None
        results = [(name, weight, o.result) for name, weight, o in others if o.result]
        added = weighted_sum(results)
        score, parts = own.result.score + added.score, {**own.result.parts, **added.parts}
        return Outcome(RewardResult(score, parts))


class StreamingRewards:
    """Scores samples by the functions, rules and servers of a configuration, in the background."""

    def __init__(self, reward: RewardConfig) -> None:
        self._plan = make_plan(reward)
        memory = int(reward.worker_memory_gib * 2**30)
        self._pool = WorkerPool(self._plan, reward.processes, reward.timeout_s, memory)
        self._remote = [
            (part, RemoteRewards(part.url, part.headers, part.batch_size, reward.timeout_s))
            for part in reward.parts
            if part.url is not None
        ]

    def submit(self, sample: Sample) -> Scoring:
        """Start to score a sample by the functions and servers that apply to its data source.

        If none applies, the rule of the data source scores it with the plan's `defaults` or the
        label `rule`, else its score is 0.
        """
        source = sample.data_source
        remote = [(p, server) for p, server in self._remote if p.applies_to(source)]
        local = any(part.applies_to(source) for part in self._plan.parts)
        by_label = reward_style(sample.extra_info) == "rule"
        by_default = not remote and (self._plan.defaults or by_label)
        own = self._pool.submit(sample) if local or by_default else None
        return Scoring(own, [(p.name, p.weight, server.submit(sample)) for p, server in remote])
