"""The rollout role: generates responses with the policy's weights."""

import time
from collections.abc import Iterable, Sequence
from dataclasses import replace
from enum import Enum

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from mindspeed_rlxf.cluster.group import Pending, RoleGroup, Sharded, submit_together
from mindspeed_rlxf.cluster.interface import Peer, Pool, PoolPart
from mindspeed_rlxf.config.enums import Role
from mindspeed_rlxf.config.schema import ActorConfig, RunConfig, ValidationConfig
from mindspeed_rlxf.data.batch import Prompts, RoleOutput, Rollouts
from mindspeed_rlxf.data.tokenizer import load_tokenizer
from mindspeed_rlxf.roles.actor import ActorGroup, ActorRole
from mindspeed_rlxf.roles.engines import device_model
from mindspeed_rlxf.roles.reports import GenerateReport
from mindspeed_rlxf.roles.scorer import ScorerRole
from mindspeed_rlxf.rollout.rollout_engine import (
    FinishReason,
    GenerationRequest,
    GenerationResult,
    answer_from_table,
)
from mindspeed_rlxf.rollout.sampling import SamplingSettings, StopStrings


class Sampling(Enum):
    """Token selection: the actor's keys, greedy, or the validation keys."""

    TRAINING = "training"
    GREEDY = "greedy"
    VALIDATION = "validation"


class RolloutGroup:
    """The generating ranks: the actor's, or the other part in disaggregated placement.

    A replica is a tensor-parallel group.
    """

    def __init__(self, config: RunConfig, pool: Pool) -> None:
        self.run, self.pool = config, pool
        generates = PoolPart(pool, *config.parts) if config.parts else pool
        self.group = RoleGroup(Role.ROLLOUT, config.rollout_layout, generates)
        self._version: int | None = None  # of the weights that the ranks have

    def build(self, eos_token_ids: Sequence[int], scored: bool = False) -> Pending:
        """Submit the role's construction, after the actor's and the scorers'.

        It shares the actor's processes and weights, unless placement is disaggregated. `scored`
        responses go to the scorers in the same processes.
        """
        actor = None if self.run.parts else Peer(Role.ACTOR_ROLLOUT)
        scorer = Peer(Role.SCORER) if scored else None
        return self.group.build(RolloutRole, self.run, tuple(eos_token_ids), actor, scorer)

    def update_weights(self, actor: ActorGroup, version: int) -> None:
        """Give the rollout the actor's weights after `version` updates, and wait."""
        if version == self._version:
            return
        parts = [self.group.prepare(RolloutRole.update_weights, version)]
        if self.run.parts:
            parts.insert(0, actor.group.prepare(ActorRole.send_weights))
        submit_together(self.pool, *parts).result()
        self._version = version

    def generate(
        self, prompts: Prompts, seed: int, sampling: Sampling = Sampling.TRAINING
    ) -> Pending:
        """Submit a response to each prompt. Rows: Rollouts. Reports: GenerateReport."""
        parts = Sharded(prompts.split(self.group.layout.dp))
        return self.group.call(RolloutRole.generate, parts, seed, sampling)


class RolloutRole:
    """One rank in a rollout replica, in the actor's process or its own."""

    def __init__(
        self,
        config: RunConfig,
        eos_token_ids: Sequence[int],
        actor: ActorRole | None = None,
        scorer: ScorerRole | None = None,
    ) -> None:
        """Build the rollout engine; a collective over the generating ranks.

        `actor` trains the weights in this process; None = other ranks train and send them. `scorer`
        scores finished responses in this process, and gets its `is_leader` here.
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
        """Give the engine the actor's weights after `version` updates.

        Untrained ranks wait for `ActorRole.send_weights`. The next report includes the time as
        `sync_s`.
        """
        started = time.monotonic()
        self.replica.take_weights(version)
        self.sync_s += time.monotonic() - started
        return RoleOutput()

    def generate(
        self, prompts: Prompts, seed: int, sampling: Sampling = Sampling.TRAINING
    ) -> RoleOutput:
        """Generate responses; rows and report only on replica leaders.

        Prompts may bring fixed responses (all or none); the engine adds log-probs. The engine wakes
        for the call and sleeps afterwards, also after an error. A scorer starts to score responses
        as they finish. The seed and the sample ids determine every sampled token.
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
            prompt_lengths=rows.prompt_lengths.tolist(),
            response_lengths=rows.response_lengths.tolist(),
            has_eos=rows.has_eos.tolist(),
            prompt_tokens=stats.prompt_tokens,
            decoded_tokens=stats.decoded_tokens,
            sampled_tokens=stats.sampled_tokens,
            sync_s=sync_s,
            device=device_model(),
        )
        return RoleOutput(rows, report)


def sampling_settings(
    actor: ActorConfig,
    eos_token_ids: Sequence[int],
    do_sample: bool,
    stop: StopStrings | None = None,
) -> SamplingSettings:
    """Return settings from the actor's keys; do_sample False means greedy, whatever they say."""
    return SamplingSettings(
        do_sample=do_sample,
        temperature=actor.temperature,
        top_k=actor.top_k,
        top_p=actor.top_p,
        min_new_tokens=actor.min_new_tokens,
        max_new_tokens=actor.max_new_tokens,
        eos_token_ids=tuple(eos_token_ids),
        stop=stop,
    )


def validation_settings(
    validation: ValidationConfig, settings: SamplingSettings
) -> SamplingSettings:
    """Return `settings` with the validation section's sampling keys."""
    return replace(
        settings,
        do_sample=validation.do_sample,
        temperature=validation.temperature,
        top_k=validation.top_k,
        top_p=validation.top_p,
    )


def make_requests(
    prompts: Prompts, settings: SamplingSettings, seed: int
) -> list[GenerationRequest]:
    """Return a request for each prompt, in order; `place` is its row."""
    samples = zip(prompts.sample_ids, prompts.token_ids, strict=True)
    return [
        GenerationRequest(place, sample_id, prompt, settings, seed)
        for place, (sample_id, prompt) in enumerate(samples)
    ]


def gather_rollouts(prompts: Prompts, results: Iterable[GenerationResult]) -> Rollouts:
    """Consume all results; return padded rows in prompt order.

    `results` must hold one for each prompt, in any order.
    """
    by_place = {result.place: result for result in results}
    assert by_place.keys() == set(range(prompts.num_rows)), "one result for each prompt"
    ordered = [by_place[place] for place in range(prompts.num_rows)]
    mask = _pad([torch.ones(len(result.tokens)) for result in ordered], torch.bool)
    stopped = [result.finish_reason is FinishReason.STOP for result in ordered]
    versions = [torch.full((len(r.tokens),), r.weights_version) for r in ordered]
    return Rollouts(
        sample_ids=prompts.sample_ids,
        prompt_ids=_pad([torch.from_numpy(ids) for ids in prompts.token_ids]),
        prompt_lengths=torch.tensor([len(ids) for ids in prompts.token_ids], dtype=torch.long),
        response_ids=_pad([torch.tensor(result.tokens) for result in ordered]),
        response_mask=mask,
        trained_mask=mask,
        has_eos=torch.tensor(stopped, dtype=torch.bool),
        rollout_log_probs=_pad([torch.tensor(r.log_probs) for r in ordered], torch.float32),
        ground_truths=prompts.ground_truths,
        data_sources=prompts.data_sources,
        weights_version=_pad(versions, torch.int32),
        extra_infos=prompts.extra_infos,
    )


def _pad(rows: list[Tensor], dtype: torch.dtype = torch.long) -> Tensor:
    if not rows:
        return torch.zeros(0, 0, dtype=dtype)
    return pad_sequence(rows, batch_first=True).to(dtype)
