"""The rollout role: it generates responses with the weights of the policy."""

import time
from collections.abc import Iterable, Sequence
from enum import Enum

from mindspeed_rlxf.cluster.group import Pending, RoleGroup, Sharded, submit_together
from mindspeed_rlxf.cluster.interface import Peer, Pool, PoolPart
from mindspeed_rlxf.config.enums import Role
from mindspeed_rlxf.config.schema import RunConfig
from mindspeed_rlxf.data.batch import Prompts, RoleOutput
from mindspeed_rlxf.data.tokenizer import load_tokenizer
from mindspeed_rlxf.roles.actor import ActorGroup, ActorRole
from mindspeed_rlxf.roles.reports import GenerateReport
from mindspeed_rlxf.roles.requests import (
    gather_rollouts,
    make_requests,
    sampling_settings,
    validation_settings,
)
from mindspeed_rlxf.roles.scorer import ScorerRole
from mindspeed_rlxf.rollout.rollout_engine import GenerationResult, answer_from_table
from mindspeed_rlxf.rollout.sampling import StopStrings


class Sampling(Enum):
    """How tokens are chosen: by the actor's keys, the most likely ones, by those of validation."""

    TRAINING = "training"
    GREEDY = "greedy"
    VALIDATION = "validation"


class RolloutGroup:
    """The ranks that generate: those of the actor, or the other part of a disaggregated pool.

    A replica is a tensor-parallel group of these ranks.
    """

    def __init__(self, config: RunConfig, pool: Pool) -> None:
        self.run, self.pool = config, pool
        generates = PoolPart(pool, *config.parts) if config.parts else pool
        self.group = RoleGroup(Role.ROLLOUT, config.rollout_layout, generates)
        self._version: int | None = None  # of the weights that the ranks have

    def build(self, eos_token_ids: Sequence[int], scored: bool = False) -> Pending:
        """Submit the building of the rollout; call it after that of actor and scorers.

        It shares the processes and weights of the actor, unless the pool is split.
        scored: responses go to the scorers in the same processes
        """
        actor = None if self.run.parts else Peer(Role.ACTOR_ROLLOUT)
        scorer = Peer(Role.SCORER) if scored else None
        return self.group.build(RolloutRole, self.run, tuple(eos_token_ids), actor, scorer)

    def update_weights(self, actor: ActorGroup, version: int) -> None:
        """Give the rollout the weights of the actor after `version` updates, and wait."""
        if version == self._version:
            return
        parts = [self.group.prepare(RolloutRole.update_weights, version)]
        if self.run.parts:
            parts.insert(0, actor.prepare_send_weights())
        submit_together(self.pool, *parts).result()
        self._version = version

    def generate(
        self, prompts: Prompts, seed: int, sampling: Sampling = Sampling.TRAINING
    ) -> Pending:
        """Submit a response to each prompt. Rows: Rollouts. Reports: GenerateReport."""
        parts = Sharded(prompts.split(self.group.layout.dp))
        return self.group.call(RolloutRole.generate, parts, seed, sampling)


class RolloutRole:
    """One rank of a rollout replica, in a process of the actor or in its own."""

    def __init__(
        self,
        config: RunConfig,
        eos_token_ids: Sequence[int],
        actor: ActorRole | None = None,
        scorer: ScorerRole | None = None,
    ) -> None:
        """Build the rollout engine; a collective over the ranks that generate.

        actor:  role of the same process that trains the weights; None = other ranks train and send
                their weights
        scorer: role of the same process that scores responses as they finish; None = no scoring
                here. Its `is_leader` is set to whether this rank leads its rollout replica
        """
        from mindspeed_rlxf.rollout.replica import build_replica  # brings in Megatron

        policy = config.actor_rollout
        self.replica = build_replica(config, actor.engine if actor else None)
        stop = None
        if policy.stop_strings:
            tokenizer = load_tokenizer(config.training.tokenizer_name_or_path)
            stop = StopStrings(policy.stop_strings, tokenizer)
        greedy = sampling_settings(policy, eos_token_ids, False, stop)
        self.settings = {
            Sampling.TRAINING: sampling_settings(policy, eos_token_ids, policy.do_sample, stop),
            Sampling.GREEDY: greedy,
            Sampling.VALIDATION: validation_settings(config.validation, greedy),
        }
        self.scorer = scorer
        if scorer is not None:
            scorer.is_leader = self.replica.is_leader
        self.sync_s = 0.0  # seconds of waiting for weights since the last report

    def update_weights(self, version: int) -> RoleOutput:
        """Give the engine the actor's weights, which have had `version` updates.

        Ranks that do not train wait for the weights that `ActorRole.send_weights` sends. The time
        is added to `sync_s`, which the next report contains.
        """
        started = time.monotonic()
        self.replica.take_weights(version)
        self.sync_s += time.monotonic() - started
        return RoleOutput()

    def generate(
        self, prompts: Prompts, seed: int, sampling: Sampling = Sampling.TRAINING
    ) -> RoleOutput:
        """Generate responses to the prompts; rows and report only on the leader of a replica.

        Takes fixed responses if the prompts have them (all or none), with the engine's log-probs.
        seed: with the sample ids it determines every sampled token
        The engine wakes for the call and sleeps afterwards, also after an error. With a scorer it
        starts to score responses as they finish.
        """
        engine = self.replica.engine
        requests = make_requests(prompts, self.settings[sampling], seed)
        results: Iterable[GenerationResult]
        with self.replica.make_room():
            try:
                started = time.monotonic()
                engine.wake()
                self.sync_s += time.monotonic() - started
                if any(prompts.responses):
                    given = dict(zip(prompts.sample_ids, prompts.responses, strict=True))
                    results = answer_from_table(engine, given, requests)
                else:
                    results = engine.generate(requests)
                if self.scorer is not None:
                    results = self.scorer.follow(prompts, results)
                rows = gather_rollouts(prompts, list(results))
            finally:
                engine.sleep()
        sync_s, self.sync_s = self.sync_s, 0.0
        if not self.replica.is_leader:
            return RoleOutput()
        stats = engine.stats()
        report = GenerateReport(
            sample_ids=rows.sample_ids,
            data_sources=rows.data_sources,
            prompt_lengths=rows.prompt_lengths.tolist(),
            response_lengths=rows.response_lengths.tolist(),
            has_eos=rows.has_eos.tolist(),
            prompt_tokens=stats.prompt_tokens,
            decoded_tokens=stats.decoded_tokens,
            sampled_tokens=stats.sampled_tokens,
            sync_s=sync_s,
            device=self.replica.device_name,
        )
        return RoleOutput(rows, report)
