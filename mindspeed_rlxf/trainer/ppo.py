"""Training loop of PPO and the critic-free algorithms."""

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from mindspeed_rlxf.algorithms.kl import KlController
from mindspeed_rlxf.checkpoint import lock
from mindspeed_rlxf.checkpoint.checkpoints import RunCheckpoints
from mindspeed_rlxf.cluster.group import RoleFuture
from mindspeed_rlxf.cluster.refs import as_rows_field
from mindspeed_rlxf.config.enums import OldLogProbs, Role
from mindspeed_rlxf.config.schema import RunConfig
from mindspeed_rlxf.data.batch import ExperienceInputs
from mindspeed_rlxf.device.peaks import find_peak
from mindspeed_rlxf.reporting.metric_table import validation_score
from mindspeed_rlxf.roles.all_roles import RoleGroups
from mindspeed_rlxf.trainer import metrics as iteration_metrics
from mindspeed_rlxf.trainer.metrics import done_work, generation_flops, idle_metrics, phase_metrics
from mindspeed_rlxf.trainer.prompt_source import PromptSource
from mindspeed_rlxf.trainer.recorder import Recorder
from mindspeed_rlxf.trainer.samples import Samples, SampleStream
from mindspeed_rlxf.trainer.stopping import StopRequest
from mindspeed_rlxf.trainer.validation import Validator


class StaleSamples(RuntimeError):
    """A trained token is from older weights than `rollout.max_staleness` allows."""


@dataclass
class Iteration:
    """What is known of an iteration once its updates have ended.

    Attributes:
        samples: The trained samples.
        phases: Its calls by phase.
        measured: Its metrics; hooks add more.
        all_s: Seconds since its start.
        driver: Further phases of the driver: (start in epoch seconds, duration), by name.
        saves: Whether a checkpoint is written.
        stops: Whether the run ends after it.
    """

    samples: Samples
    phases: dict[str, list[RoleFuture]]
    measured: dict[str, float]
    all_s: float
    driver: dict[str, tuple[float, float]] = field(default_factory=dict)
    saves: bool = False
    stops: bool = False


class PpoTrainer:
    """The training loop, run by the driver, with references to rows and no tensors."""

    def __init__(
        self,
        config: RunConfig,
        roles: RoleGroups,
        prompts: PromptSource,
        validator: Validator,
        recorder: Recorder,
        checkpoints: RunCheckpoints,
        stop: StopRequest,
    ) -> None:
        self.config, self.prompts, self.checkpoints = config, prompts, checkpoints
        self.stop = stop
        checkpoints.on_publish = lambda iteration: setattr(stop, "saved", iteration)
        self.actor, self.rollout = roles.actor, roles.rollout
        self.ref, self.critic = roles.ref, roles.critic
        self.samples = SampleStream(config, roles, prompts)
        self.validator, self.recorder = validator, recorder
        control = config.algorithm.kl_ctrl
        self.kl = KlController(
            control.kl_coef,
            control.type == "adaptive",
            control.target_kl,
            float(control.horizon),
        )
        self._recompute = config.old_log_probs is OldLogProbs.RECOMPUTE
        # Whether other ranks generate while the actor's train.
        self._overlaps = bool(config.train_rollout_split)
        self.iteration = 0
        self.hooks: list[Callable[[Iteration], None]] = [
            self._record,
            self._validate,
            self._check_health,
            self._begin_save,
            self._write_lines,
            self._commit_save,
            self._stop,
        ]

    def fit(self) -> None:
        """Train to iteration `train_iters`; write metrics, samples, validations and checkpoints.

        With `validation.before` a run at iteration 0 validates first. An iteration: weights ->
        its samples -> log-probs, values -> experience -> updates; the actor's only after the
        warm-up iterations, the critic's until it is frozen; then hooks. Experience is made on the
        critic's ranks, or the actor's without a critic.

        With a lead of 1 an iteration's samples were generated beside the updates before, and those
        of the next are generated beside its own, with the weights before them. Its own are missing
        only at the start, after a resume without what was generated ahead, and after a failure of a
        rollout server: the next weights that are sent start another.

        Raises Stopped or StoppedByRule, after saving, when the run has to end earlier; WorkerError,
        RuntimeTimeout, RewardsFailed and StaleSamples, without saving.
        """
        if self.config.validation.before and self.iteration == 0:
            self.validator.validate(self.iteration, version=0, own_line=True)
        while self.iteration < self.config.training.train_iters:
            self.iteration += 1
            started = time.monotonic()
            self.stop.begin_iteration()

            version = self.config.count_updates(self.iteration - 1)
            self.rollout.update_weights(self.actor, version)
            batches_left = self.config.training.train_iters - self.iteration + 1
            while not self.samples.generate(batches_left):
                self.rollout.update_weights(self.actor, version)
            samples = self.samples.next_samples()
            leads = self.config.lead > 0 and batches_left > 1
            if leads and not self._overlaps:  # these ranks train next, and change the weights
                self.samples.generate(batches_left - 1)

            phases = self._make_experience(samples)
            rollouts, experience = samples.rollouts, phases["adv"].rows()
            updates: dict[str, RoleFuture] = {}
            if self.critic and self.iteration <= self.config.critic_iters:
                updates["update_critic"] = self.critic.update_critic(
                    rollouts, experience, samples.responses, self.iteration
                )
            if self.iteration > self.config.warmup_iters:
                updates["update_actor"] = self.actor.update_policy(
                    rollouts, experience, samples.responses, self.iteration, self.kl.value
                )
            if batches_left > 1:
                self.prompts.read_ahead(self.config.training.global_batch_size)
            if leads and self._overlaps:
                self.samples.generate(batches_left - 1)

            measured = self._measure(samples, phases, updates)
            calls = {name: [call] for name, call in {**phases, **updates}.items()}
            calls = {**self.samples.pop_calls(), **calls}
            finished = Iteration(samples, calls, measured, time.monotonic() - started)
            self._run_hooks(finished)
        self.checkpoints.settle(self.recorder.note)

    def _make_experience(self, samples: Samples) -> dict[str, RoleFuture]:
        """Start log-probs, values and the experience; return the calls by phase (`adv`: rows)."""
        rollouts, lengths = samples.rollouts, samples.responses
        calls: dict[str, RoleFuture] = {}
        if self._recompute:
            calls["old_log_prob"] = self.actor.log_probs(rollouts, lengths)
        if self.ref:
            calls["ref"] = self.ref.log_probs(rollouts, lengths)
        if self.critic:
            calls["values"] = self.critic.values(rollouts, lengths)
        rows = {name: call.rows() for name, call in calls.items()}
        greedy, greedy_scores = samples.greedy_rows or (None, None)
        inputs = ExperienceInputs(
            rollouts=as_rows_field(rollouts),
            old=as_rows_field(rows.get("old_log_prob")),
            ref=as_rows_field(rows.get("ref")),
            scores=as_rows_field(samples.scores),
            values=as_rows_field(rows.get("values")),
            greedy=as_rows_field(greedy),
            greedy_scores=as_rows_field(greedy_scores),
            kl_coef=self.kl.value,
            slot_limit=self._slot_limit(samples),
            token_log=self.recorder.token_log(self.iteration, samples.sample_ids()),
        )
        experience = (self.critic or self.actor).make_experience(inputs)
        for producer in calls.values():
            experience.after(producer)  # whose time is no part of this phase's deadline
        return {**calls, "adv": experience}

    def _measure(
        self, samples: Samples, phases: dict[str, RoleFuture], updates: dict[str, RoleFuture]
    ) -> dict[str, float]:
        """Wait for the updates; return the metrics of samples, experience and updates.

        Adapts the KL coefficient. Raises StaleSamples.
        """
        self._check_staleness(samples)
        old, scores = phases.get("old_log_prob"), samples.score_report()
        group_size = self.config.actor_rollout.n_samples_per_prompt
        measured = {
            **self.samples.metrics(samples),
            **iteration_metrics.rollout_metrics(samples.responses()),
            **iteration_metrics.agent_metrics(samples.taken.result()),
            **(iteration_metrics.log_prob_metrics(old.result()) if old else {}),
            **iteration_metrics.score_metrics(scores),
            **iteration_metrics.source_metrics(scores, samples.data_sources()),
            **iteration_metrics.group_metrics(scores, group_size),
            **iteration_metrics.experience_metrics(phases["adv"].result(), self.kl.value),
        }
        for name, update in updates.items():
            role = name.removeprefix("update_")
            measured |= iteration_metrics.update_metrics(role, update.result()[0])
        if "update_actor" in updates:
            is_unchanged = measured["actor/lr"] == 0 or measured["actor/grad_norm"] == 0
            was_skipped = measured.get("actor/skipped_steps")
            self.rollout.moved = not (is_unchanged or was_skipped)
            # The KL of a policy that does not change is no reason to change the coefficient.
            if self.ref:
                self.kl.update(measured["critic/kl"], self.config.samples_per_iteration)
        return measured | self._measure_lead(samples, [phases["adv"], *updates.values()])

    def _measure_lead(self, samples: Samples, training: list[RoleFuture]) -> dict[str, float]:
        """Return how old the samples are, and whether training or generation waited."""
        measured: dict[str, float] = {}
        if self.config.rollout.max_staleness:
            version = self.config.count_updates(self.iteration - 1)
            measured |= iteration_metrics.staleness_metrics(samples.taken.result(), version)
        is_last = self.iteration == self.config.training.train_iters
        if self.config.lead and self._overlaps and not is_last:
            replies = [reply for call in training for reply in call.replies()]
            trained = max(reply.started + reply.seconds for reply in replies)
            measured |= iteration_metrics.wait_metrics(self.samples.ended, trained)
        return measured

    def _check_staleness(self, samples: Samples) -> None:
        """Raise StaleSamples if a trained token is of weights older than `max_staleness` allows."""
        staleness = self.config.rollout.max_staleness
        oldest = self.config.count_updates(self.iteration - 1 - staleness)
        versions = samples.oldest_versions()
        for sample_id, version in zip(samples.sample_ids(), versions, strict=True):
            if version < oldest:
                raise StaleSamples(
                    f"every token of iteration {self.iteration} must be from weights of version "
                    f"{oldest} or newer (rollout.max_staleness={staleness}), sample {sample_id} "
                    f"has tokens of version {version}; this is an error of the program"
                )

    def _run_hooks(self, finished: Iteration) -> None:
        """Write the iteration's metrics, samples and prompts; validate and save when due.

        Raises:
            Stopped: After saving, if the run has to end here (`StopRequest`); never in the last
                iteration.
            StoppedByRule: Likewise, by `logging.stop_on`.
            LockLost: Before anything is written.
        """
        lock.require(self.checkpoints.directory.path)  # first of all: the rest writes files there
        for hook in self.hooks:
            hook(finished)

    def _record(self, finished: Iteration) -> None:
        """Add metrics of time and throughput, and write the samples."""
        phases, measured, all_s = finished.phases, finished.measured, finished.all_s
        samples = finished.samples
        finished.driver["iteration"] = (time.time() - all_s, all_s)
        reports, work = samples.generate_reports(), done_work(phases)
        flops = generation_flops(self.config, reports) + work.flops
        peak = find_peak(reports[0].device) if self.config.actor_rollout.bf16 else None
        sizes = {pool: sum(processes) for pool, processes in self.config.resource_pool.items()}
        # Pools of a local runtime are the same processes and count once.
        is_local = self.config.runtime.kind == "local"
        num_devices = max(sizes.values()) if is_local else sum(sizes.values())
        measured |= phase_metrics(phases)
        measured |= {"timing/sync": self.samples.pop_sync_s(), "timing/all": all_s}
        policy_pool = self.config.placement[Role.ACTOR_ROLLOUT]
        split = self.config.train_rollout_split
        subpool_sizes = {policy_pool: split} if split else None
        measured |= idle_metrics(phases, sizes, all_s, subpool_sizes)
        measured["throughput/computed_tokens"] = float(work.tokens)
        measured |= iteration_metrics.throughput_metrics(reports, flops, all_s, num_devices, peak)
        self.recorder.write_samples(
            self.iteration,
            self.actor,
            samples.rollouts,
            [samples.score_report()],
            samples.sample_fields(),
        )
        self.recorder.warn_of_non_finite(self.iteration, measured, samples.non_finite_scores())

    def _validate(self, finished: Iteration) -> None:
        """Validate, if that is due; the rollout gets the weights of this iteration."""
        validation = self.config.validation
        is_last = self.iteration == self.config.training.train_iters
        is_due = validation.interval and self.iteration % validation.interval == 0
        if is_due or (is_last and validation.after):
            began = time.time()
            version = self.config.count_updates(self.iteration)
            finished.measured.update(self.validator.validate(self.iteration, version))
            finished.driver["validation"] = began, time.time() - began

    def _check_health(self, finished: Iteration) -> None:
        """Apply the health rules; decide whether the run stops and whether this one is saved."""
        found = self.recorder.check_health(self.iteration, finished.measured)
        if found:
            self.stop.request(found.rule, f"{found.text}; {found.remedy}")
        self.stop.end_iteration(self.iteration)
        is_last = self.iteration == self.config.training.train_iters
        finished.stops = not is_last and self.stop.is_due()
        finished.saves = self.stop.agree(self.checkpoints.is_due(self.iteration, finished.stops))

    def _begin_save(self, finished: Iteration) -> None:
        """Wait for the checkpoint before, and write one if it is due."""
        settled = time.time()
        self.checkpoints.settle(self.recorder.note)
        began = time.time()
        if self.config.rollout.max_staleness:
            finished.measured["timing/save_wait"] = began - settled
        if finished.saves:
            seconds = self.checkpoints.write(self.iteration, self.recorder.note)
            finished.measured["timing/save"] = seconds
            finished.driver["save"] = began, seconds

    def _write_lines(self, finished: Iteration) -> None:
        """Write the lines of metrics.jsonl, consumed.jsonl and the timeline."""
        self.recorder.write_consumed(self.iteration, finished.samples.consumed)
        self.recorder.write_iteration(self.iteration, finished.measured, finished.all_s)
        self.recorder.write_timeline(self.iteration, finished.driver)

    def _commit_save(self, finished: Iteration) -> None:
        """Publish the checkpoint."""
        if not finished.saves:
            return
        measured, note = finished.measured, self.recorder.note
        score = validation_score(measured, self.config.validation.best_metric)
        self.checkpoints.commit(self.iteration, self.state_dict(), score, note)
        if finished.stops:
            self.checkpoints.settle(note)
        # Seconds of a save that is waited for, as the last one of a run is.
        whole_s = measured["timing/save"] + self.checkpoints.write_s
        self.stop.record_save(self.checkpoints.newest, whole_s)

    def _stop(self, finished: Iteration) -> None:
        """Raise Stopped or StoppedByRule if the run ends here."""
        if finished.stops:
            raise self.stop.ended()

    def _slot_limit(self, samples: Samples) -> int:
        if self.config.algorithm.score_slot_limit == "batch_width":
            return max(samples.responses().responses)
        return self.config.actor_rollout.max_new_tokens

    def state_dict(self) -> dict[str, Any]:
        """Return iteration, KL coefficient, prompt position and the samples begun (JSON)."""
        return {
            "iteration": self.iteration,
            "kl": {"value": self.kl.value},
            "prompts": self.prompts.state_dict(),
            "stream": self.samples.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the result of `state_dict`; without "stream" all begun samples are lost."""
        self.iteration = state["iteration"]
        self.kl.value = float(state["kl"]["value"])
        self.prompts.load_state_dict(state["prompts"])
        if "stream" in state:
            self.samples.load_state_dict(state["stream"])
