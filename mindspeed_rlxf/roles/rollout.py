"""The rollout role: generates responses with the policy's weights."""

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np

from mindspeed_rlxf.cluster.group import RoleFuture, RoleGroup, Sharded, submit_together
from mindspeed_rlxf.cluster.interface import ColocatedRole, Pool, SubPool
from mindspeed_rlxf.config.enums import Role
from mindspeed_rlxf.config.schema import RunConfig
from mindspeed_rlxf.data.agent_record import find_record
from mindspeed_rlxf.data.batch import Prompts, RoleOutput, Rollouts
from mindspeed_rlxf.data.tokenizer import load_tokenizer
from mindspeed_rlxf.roles.actor import ActorGroup, ActorRole
from mindspeed_rlxf.roles.conversations import AgentHost, Conversations, generate_conversations
from mindspeed_rlxf.roles.drawn_samples import DrawnSample, DrawnSamples
from mindspeed_rlxf.roles.engines import device_model, keep, let_stay
from mindspeed_rlxf.roles.own_roles import role_factory
from mindspeed_rlxf.roles.reports import (
    EndedResponse,
    GenerateReport,
    SliceReport,
    failed_by_agent,
)
from mindspeed_rlxf.roles.requests import (
    gather_rollouts,
    make_requests,
    sampling_settings,
    validation_settings,
)
from mindspeed_rlxf.roles.scorer import ScorerRole
from mindspeed_rlxf.roles.weights_probe import PROBE, ProbeReport, probe_rows
from mindspeed_rlxf.rollout.ahead import SavedSample, read_ahead, write_ahead
from mindspeed_rlxf.rollout.rollout_engine import (
    FinishReason,
    GenerationResult,
    GenerationStats,
    StepwiseEngine,
    answer_from_table,
)
from mindspeed_rlxf.rollout.sampling import Sampling, StopStrings


class RolloutGroup:
    """The generating ranks: the actor's, or the other part in disaggregated placement.

    A replica is a tensor-parallel group.

    Attributes:
        server_has_failed: Whether a replica's server has failed since the weights were sent last.
            `update_weights` starts another.
        moved: Whether the last update must have changed some weights.
    """

    def __init__(self, config: RunConfig, pool: Pool) -> None:
        self.run, self.pool = config, pool
        split = config.train_rollout_split
        generates = SubPool(pool, *split) if split else pool
        self.group = RoleGroup(Role.ROLLOUT, config.rollout_layout, generates)
        self._version: int | None = None  # of the weights that the ranks have
        self._has_base = False  # whether the ranks have what the adapters belong to
        self.write_receipt: Callable[[dict[str, Any]], None] = lambda _: None
        self._actor: ActorGroup | None = None  # whose weights these are
        self.server_has_failed = False
        self.moved = False
        # (sample id, sampling) -> replica that generates it, until it is forgotten
        self._replica_of: dict[tuple[int, Sampling], int] = {}

    def build(
        self, eos_token_ids: Sequence[int], scored: bool = False, logs: str = ""
    ) -> RoleFuture:
        """Submit the role's construction, after the actor's and the scorers'.

        It shares the actor's processes and weights, unless placement is disaggregated. `scored`
        responses go to the scorers in the same processes. Servers log into the folder `logs`.
        """
        actor = None if self.run.train_rollout_split else ColocatedRole(Role.ACTOR_ROLLOUT)
        scorer = ColocatedRole(Role.SCORER) if scored else None
        ends, factory = tuple(eos_token_ids), role_factory(Role.ROLLOUT, RolloutRole)
        return self.group.build(factory, self.run, ends, actor, scorer, logs)

    def update_weights(self, actor: ActorGroup, version: int) -> None:
        """Give the rollout the actor's weights after `version` updates, and wait.

        Servers are probed before the first time, and after this if one was started again or has
        failed in it; then they get the weights once more.

        Raises:
            ValueError: A server answers the probe wrongly, or got the same bits though they moved.
        """
        if version == self._version and not self.server_has_failed:
            return
        if self.server_has_failed:
            self._has_base = False
        if self._version is None and self.run.runs_vllm:
            self._probe(actor)
        while self._write(self._send(actor, version)):
            self._probe(actor)
        self._version, self._actor = version, actor
        self.server_has_failed = False

    def _write(self, receipts: Iterable[tuple[int, Any]]) -> bool:
        """Write and check receipts; return whether a server was started again, or has failed."""
        restarted = False
        is_new = not self.server_has_failed  # else others may get the same weights once more
        for replica, receipt in receipts:
            self.write_receipt({"replica": replica, **receipt})
            if self.moved and is_new and self._version is not None and receipt["changed"] == 0:
                raise ValueError(
                    f"weights of version {receipt['version']} are those of version "
                    f"{self._version}, bit by bit, though they were trained: {receipt['first']} "
                    "and all others; look for weights that are trained beside those that are "
                    "sent, as an adapter's"
                )
            restarted |= receipt["restarted"]
        return restarted

    def _probe(self, actor: ActorGroup) -> None:
        """Send strongly changed weights, and compare log-probs; the next update overwrites them."""
        rows = probe_rows(self.run.training.seq_length, self.run.actor_rollout)
        trained: ProbeReport = actor.group.call(ActorRole.begin_probe, rows).result()[0]
        receipts = self._send(actor, PROBE)
        scored = self.group.call(RolloutRole.score, rows).result()
        actor.group.call(ActorRole.end_probe).result()
        for (replica, receipt), log_probs in zip(receipts, scored, strict=True):
            gap = trained.gap(log_probs)
            measured = {"log_prob_gap": gap, "log_prob_gap_limit": trained.limit}
            self.write_receipt({"replica": replica, **receipt, **measured})
            if not gap <= trained.limit:
                raise ValueError(
                    f"log-probs of the vLLM server {replica} and of training must differ by at "
                    f"most {trained.limit:.3g} (root mean square) on changed weights, not "
                    f"{gap:.3g}; the server computes another model: compare its config.json and "
                    "versions"
                )

    def _send(self, actor: ActorGroup, version: int) -> list[tuple[int, Any]]:
        """Send the weights and wait; return (replica, receipt), in order.

        Where adapters are trained, they go alone once their base is there; a probe changes both.
        """
        is_probe = version == PROBE
        trains_base = self.run.actor_rollout.lora.rank == 0
        with_base = trains_base or is_probe or not self._has_base
        self._has_base = not is_probe
        parts = [self.group.prepare(RolloutRole.update_weights, version, with_base)]
        if self.run.train_rollout_split:
            parts.insert(0, actor.group.prepare(ActorRole.send_weights, with_base))
        replies = submit_together(self.pool, *parts).replies()
        reports = [reply.report for reply in replies if reply.report]  # of leaders with servers
        return [(n, receipt) for n, report in enumerate(reports) for receipt in report]

    def generate(
        self, prompts: Prompts, seed: int, sampling: Sampling = Sampling.TRAINING
    ) -> RoleFuture:
        """Submit a response to each prompt. Rows: Rollouts. Reports: GenerateReport.

        Waits for servers: after a failure they get the weights again, and the prompts.
        """
        parts = Sharded(prompts.split(self.group.layout.dp))
        call = self.group.call(RolloutRole.generate, parts, seed, sampling)
        while self.run.runs_vllm and None in call.result():
            assert self._actor is not None and self._version is not None, "weights come first"
            self.server_has_failed = True
            self.update_weights(self._actor, self._version)
            call = self.group.call(RolloutRole.generate, parts, seed, sampling)
        return call

    def add(
        self, prompts: Prompts, seed: int, sampling: Sampling = Sampling.TRAINING
    ) -> RoleFuture:
        """Submit prompts to the replicas' queues. No rows, no report."""
        rows_of: list[list[int]] = [[] for _ in range(self.group.layout.dp)]
        for row, replica in enumerate(self._choose_replicas(prompts)):
            rows_of[replica].append(row)
            self._replica_of[prompts.sample_ids[row], sampling] = replica
        parts = Sharded([prompts.select(rows) for rows in rows_of])
        return self.group.call(RolloutRole.add, parts, seed, sampling, any(prompts.responses))

    def _choose_replicas(self, prompts: Prompts) -> list[int]:
        """Return the replica of each row.

        With `rollout.max_staleness` the sample id alone decides, so that a resumed run, which adds
        several batches at once, generates each sample where the run before it did. Otherwise the
        replicas get consecutive rows, equally many, or whole prompts where that is impossible.
        """
        dp, size = self.group.layout.dp, self.run.actor_rollout.n_samples_per_prompt
        prompt_of = [sample_id // size for sample_id in prompts.sample_ids]
        if self.run.rollout.max_staleness > 0:
            return [prompt % dp for prompt in prompt_of]
        count = prompts.num_rows
        if count % dp == 0:
            return [row * dp // count for row in range(count)]
        distinct = list(dict.fromkeys(prompt_of))
        return [distinct.index(prompt) * dp // len(distinct) for prompt in prompt_of]

    def advance(self, steps: int | None) -> RoleFuture:
        """Submit a slice of `steps` decode steps; None = until nothing is left.

        Reports: SliceReport per replica; waiting for them sets `server_has_failed`.
        """
        return self.group.call(RolloutRole.advance, steps).require(self._note_failures)

    def _note_failures(self, reports: list[SliceReport]) -> None:
        self.server_has_failed |= any(report.server_has_failed for report in reports)

    def take(self, sample_ids: Sequence[int], sampling: Sampling = Sampling.TRAINING) -> RoleFuture:
        """Ask for ended samples. Rows: Rollouts, in this order. Reports: GenerateReport.

        The reports have the samples of each replica in this order (`RoleFuture.in_order`). The
        replicas keep the samples until `forget`.
        """
        rows_of: list[list[int]] = [[] for _ in range(self.group.layout.dp)]
        for row, sample_id in enumerate(sample_ids):
            rows_of[self._replica_of[sample_id, sampling]].append(row)
        parts = [[sample_ids[row] for row in rows] for rows in rows_of]
        pending = self.group.call(RolloutRole.take, Sharded(parts), sampling)
        joined = [row for rows in rows_of for row in rows]
        if joined == sorted(joined):
            return pending
        return pending.reorder(sorted(range(len(joined)), key=joined.__getitem__))

    def withdraw(self) -> RoleFuture:
        """Ask the engines to drop what is unfinished; it goes on in the next slice."""
        return self.group.call(RolloutRole.withdraw)

    def forget(self, sample_ids: Sequence[int]) -> RoleFuture:
        """Have the replicas forget ended samples, their greedy responses and their scores."""
        for sample_id in sample_ids:
            for sampling in Sampling:
                self._replica_of.pop((sample_id, sampling), None)
        return self.group.call(RolloutRole.forget, list(sample_ids))

    def save_ahead(self, folder: Path) -> RoleFuture:
        """Have each replica write what it knows; comes after `forget`.

        Reports: manifest entries, with paths relative to `folder`.
        """
        replicas = Sharded(list(range(self.group.layout.dp)))
        return self.group.call(RolloutRole.save_ahead, folder, replicas)

    def load_ahead(self, folder: Path) -> RoleFuture:
        """Have all ranks read what `save_ahead` wrote in any layout, for samples added later."""
        return self.group.call(RolloutRole.load_ahead, folder)


class RolloutRole:
    """One rank in a rollout replica, in the actor's process or its own."""

    def __init__(
        self,
        config: RunConfig,
        eos_token_ids: Sequence[int],
        actor: ActorRole | None = None,
        scorer: ScorerRole | None = None,
        logs: str = "",
    ) -> None:
        """Build the rollout engine; a collective over the generating ranks.

        `actor` trains the weights in this process; None = other ranks train and send them. `scorer`
        scores finished responses in this process, and gets its `is_leader` here. Servers log into
        the folder `logs`.
        """
        from mindspeed_rlxf.rollout.replica import build_replica  # brings in Megatron

        policy = config.actor_rollout
        self.replica = build_replica(config, actor.engine if actor else None, logs)
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
        self._is_colocated = actor is not None
        self._is_awake = False  # since the last update of the weights
        self.scorer = scorer
        if scorer is not None:
            scorer.is_leader = self.replica.is_leader
        self.samples = DrawnSamples()
        self.agents: AgentHost | None = None
        self.conversations: Conversations | None = None
        if config.rollout.runs_agents:
            self.agents = AgentHost(config, eos_token_ids, self.replica)
            self.conversations = Conversations(self.agents, self.samples)
        self._has_fixed = False  # whether samples with fixed responses were added, to any replica
        # Since the last report: counts of slices, and seconds of waiting for weights.
        self._stats = GenerationStats()
        self.sync_s = 0.0

    def update_weights(self, version: int, with_base: bool) -> RoleOutput:
        """Give the engine the actor's weights after `version` updates.

        With adapters and not `with_base` it gets the adapters alone. Untrained ranks wait for
        `ActorRole.send_weights`. The next report includes the time as `sync_s`. Report: receipts of
        servers.
        """
        assert self.samples.are_withdrawn, "`withdraw` comes before new weights"
        started = time.monotonic()
        keep(self)
        if self._is_awake and self._is_colocated:
            self.replica.engine.sleep()  # the stream needs the training weights on the device
        self._is_awake = False
        self.replica.take_weights(version, with_base)
        self.sync_s += time.monotonic() - started
        return RoleOutput(report=self.replica.take_receipts())

    def score(self, rows: Rollouts) -> RoleOutput:
        """Score the responses at temperature 1. Report: log-probs, one list for each row."""
        prompts = [np.asarray(tokens) for tokens in rows.prompt_tokens()]
        with self._awake() as engine:
            log_probs = engine.score(prompts, rows.response_tokens())
        return RoleOutput(report=log_probs)

    @contextmanager
    def _awake(self) -> Iterator[StepwiseEngine]:
        """Yield the engine, awake. After the block it sleeps when training needs the device."""
        keep(self)
        engine = self.replica.engine
        try:
            with self.replica.make_room():
                if not self._is_awake:
                    started = time.monotonic()
                    engine.wake()
                    self.sync_s += time.monotonic() - started
                    self._is_awake = True
                yield engine
        finally:
            let_stay(self)

    def leave_device(self) -> None:
        """Put the engine to sleep, for others in this process that need the device.

        Unfinished responses leave it, as their cache is on the device.
        """
        self._withdraw()
        self._is_awake = False
        self.replica.engine.sleep()

    def generate(
        self, prompts: Prompts, seed: int, sampling: Sampling = Sampling.TRAINING
    ) -> RoleOutput:
        """Generate responses; rows and report only on replica leaders.

        Prompts may bring fixed responses (all or none); the engine adds log-probs. The engine stays
        awake afterwards, until training needs the device. A scorer starts to score responses as
        they finish. The seed and the sample ids determine every sampled token.

        After a failure of the server there are no rows and no report; a conversation that an agent
        leads raises EngineLost then.
        """
        settings = self.settings[sampling]
        requests = make_requests(prompts, settings, seed)
        results: Iterable[GenerationResult]
        with self._awake() as engine:
            stats = None
            if self.agents is not None:
                prompts, results, stats = generate_conversations(
                    self.agents, engine, prompts, sampling, settings, seed
                )
            elif any(prompts.responses):
                given = dict(zip(prompts.sample_ids, prompts.responses, strict=True))
                results = answer_from_table(engine, given, requests)
            else:
                results = engine.generate(requests)
            if self.scorer is not None:
                results = self.scorer.follow(prompts, results)
            responses = list(results)
            if self.replica.server_has_failed():
                return RoleOutput()
            return self._make_output(prompts, responses, stats or engine.stats())

    def _make_output(
        self, prompts: Prompts, results: Sequence[GenerationResult], stats: GenerationStats
    ) -> RoleOutput:
        """Return rows and report of these responses, on leaders; `place` is the prompt's row."""
        sync_s, self.sync_s = self.sync_s, 0.0
        if not self.replica.is_leader:
            return RoleOutput()
        rows = gather_rollouts(prompts, results)
        ordered = sorted(results, key=lambda result: result.place)
        records = [find_record(extra_info) for extra_info in rows.extra_infos]
        report = GenerateReport(
            prompt_lengths=rows.prompt_lengths.tolist(),
            response_lengths=rows.response_lengths.tolist(),
            has_eos=rows.has_eos.tolist(),
            prompt_tokens=stats.prompt_tokens,
            decoded_tokens=stats.decoded_tokens,
            sampled_tokens=stats.sampled_tokens,
            sync_s=sync_s,
            device=device_model(),
            oldest_versions=[min(result.token_versions) for result in ordered],
            mean_versions=[fmean(result.token_versions) for result in ordered],
            records=records,
            agent_failures=list(map(failed_by_agent, rows.sample_ids, records)),
        )
        return RoleOutput(rows, report)

    def add(
        self,
        prompts: Prompts,
        seed: int,
        sampling: Sampling = Sampling.TRAINING,
        has_fixed: bool = False,
    ) -> RoleOutput:
        """Append samples to the queue; no rows, no report.

        Of those that `load_ahead` has read only the rest is generated. `has_fixed`: whether some
        replica gets fixed responses, so that ranks that share experts agree.
        """
        self._has_fixed |= has_fixed
        agents = self.agents.choose(prompts) if self.agents is not None else None
        self.samples.add(prompts, sampling, self.settings[sampling], seed, agents)
        return RoleOutput()

    def advance(self, steps: int | None) -> RoleOutput:
        """Generate for at most `steps` decode steps, or until nothing is left (None).

        Fixed responses end at once. A scorer starts to score responses as they end. Report:
        SliceReport, on leaders; samples that `load_ahead` found ended are in the first one after
        they were added.
        """
        self.samples.saved.clear()  # what is left is of samples that other replicas have
        ended = self.samples.pop_ended_before()
        for sample in ended:
            self._start_scoring(sample)
        with self._awake() as engine:
            if self.conversations is not None:
                for sample in self.conversations.run_slice(engine, steps):
                    ended.append(sample)
                    self._start_scoring(sample)
            else:
                entering = self._answer_fixed(engine, self.samples.enter_engine(), ended)
                engine.add([sample.request for sample in entering])
                for result in engine.advance(steps):
                    ended.append(self.samples.end(result))
                    self._start_scoring(ended[-1])
            self._stats += engine.stats()
        if not self.replica.is_leader:
            return RoleOutput()
        ended.sort(key=lambda sample: sample.order)
        return RoleOutput(
            report=SliceReport(
                list(map(_name_ended, ended)),
                self.samples.num_unfinished,
                self.replica.server_has_failed(),
            )
        )

    def _answer_fixed(
        self, engine: StepwiseEngine, samples: list[DrawnSample], ended: list[DrawnSample]
    ) -> list[DrawnSample]:
        """Score the fixed responses and append their samples to `ended`; return the others."""
        if not self._has_fixed:
            return samples
        # All ranks that share experts score then, some perhaps nothing.
        fixed = [sample for sample in samples if sample.fixed_response]
        given = {sample.request.sample_id: sample.fixed_response for sample in fixed}
        for result in answer_from_table(engine, given, [sample.request for sample in fixed]):
            ended.append(self.samples.end(result))
            self._start_scoring(ended[-1])
        self._stats += engine.stats()
        return [sample for sample in samples if not sample.fixed_response]

    def _start_scoring(self, sample: DrawnSample) -> None:
        if self.scorer is not None:
            assert sample.result is not None
            self.scorer.start(sample.prompt, sample.result)

    def take(self, sample_ids: Sequence[int], sampling: Sampling = Sampling.TRAINING) -> RoleOutput:
        """Return ended samples: rows in this order, and a report with all counts since the last.

        Both only on leaders. The samples stay known until `forget`.
        """
        prompts = Prompts([], [], [], [], [])
        results: list[GenerationResult] = []
        for sample_id in sample_ids:
            result = self.samples[sample_id, sampling].result
            assert result is not None, f"the response of sample {sample_id} has not ended"
            results.append(replace(result, place=len(results)))
        if sample_ids:
            prompts = Prompts.concat([self.samples[i, sampling].prompt for i in sample_ids])
        stats, self._stats = self._stats, GenerationStats()
        return self._make_output(prompts, results, stats)

    def withdraw(self) -> RoleOutput:
        """Take unfinished responses back from the engine, which drops all that it computed.

        The next `advance` gives them to it again, in the order of the stream.
        """
        self._withdraw()
        return RoleOutput()

    def _withdraw(self) -> None:
        self.samples.leave_engine(self.replica.engine.withdraw())

    def forget(self, sample_ids: Sequence[int]) -> RoleOutput:
        """Forget ended samples, their greedy responses and their scores."""
        self.samples.forget(sample_ids)
        if self.scorer is not None:
            self.scorer.forget(sample_ids)
        return RoleOutput()

    def save_ahead(self, folder: Path, replica: int) -> RoleOutput:
        """Write all known samples that have tokens to `folder`; only leaders do.

        Unfinished responses leave the engine first, as `withdraw` says. Report: the files' manifest
        entries, with paths relative to `folder`.
        """
        self._withdraw()
        if not self.replica.is_leader:
            return RoleOutput()
        saved = []
        for sample in self.samples.known:
            response = sample.saved_response
            if response is None:
                continue
            outcomes = None
            if self.scorer is not None and sample.result is not None:
                sample_id, tokens = sample.request.sample_id, sample.result.tokens
                outcomes = self.scorer.save_outcomes(sample_id, tokens)
            saved.append(SavedSample(*sample.key, response, outcomes))
        return RoleOutput(report=write_ahead(folder, replica, saved))

    def load_ahead(self, folder: Path) -> RoleOutput:
        """Read the samples of all replicas, in whatever layout they were written.

        Those that are added later have what was sampled of their responses, and their scores.
        """
        for saved in read_ahead(folder):
            self.samples.saved[saved.sample_id, saved.sampling] = saved.response
            if self.scorer is not None and saved.outcomes is not None:
                response = saved.response.tokens.tolist()
                self.scorer.restore_outcomes(saved.sample_id, response, saved.outcomes)
        return RoleOutput()


def _name_ended(sample: DrawnSample) -> EndedResponse:
    result = sample.result
    assert result is not None
    has_eos = result.finish_reason is FinishReason.STOP
    return EndedResponse(sample.request.sample_id, sample.sampling, len(result.tokens), has_eos)
