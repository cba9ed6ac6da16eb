"""Training loop of PPO and the critic-free algorithms."""

import time
from typing import Any

from mindspeed_rlxf.algorithms.kl import KlController
from mindspeed_rlxf.checkpoint import lock
from mindspeed_rlxf.checkpoint.checkpoints import RunCheckpoints
from mindspeed_rlxf.checkpoint.recorder import Recorder
from mindspeed_rlxf.checkpoint.stopping import StopRequest
from mindspeed_rlxf.cluster.group import Pending
from mindspeed_rlxf.cluster.refs import as_rows_field
from mindspeed_rlxf.config.enums import OldLogProbs
from mindspeed_rlxf.config.schema import RunConfig
from mindspeed_rlxf.data.batch import ExperienceInputs
from mindspeed_rlxf.device.peaks import find_peak
from mindspeed_rlxf.reporting.metric_table import validation_score
from mindspeed_rlxf.roles.all_roles import RoleGroups
from mindspeed_rlxf.trainer import metrics as names
from mindspeed_rlxf.trainer.collector import Collected, Collector
from mindspeed_rlxf.trainer.metrics import done_work, generation_flops, idle_metrics, phase_metrics
from mindspeed_rlxf.trainer.prompt_source import PromptSource
from mindspeed_rlxf.trainer.validation import Validator


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
        self.collector = Collector(config, roles, prompts)
        self.validator, self.recorder = validator, recorder
        control = config.algorithm.kl_ctrl
        self.kl = KlController(
            control.kl_coef,
            control.type == "adaptive",
            control.target_kl,
            float(control.horizon),
        )
        self._recompute = config.old_log_probs is OldLogProbs.RECOMPUTE
        self.iteration = 0

    def fit(self) -> None:
        """Train to iteration `train_iters`; write metrics, samples, validations and checkpoints.

        With `validation.before` a run at iteration 0 validates first. An iteration: weights ->
        generate, score -> log-probs, values -> experience -> updates; the actor's only after the
        warm-up iterations. Experience is made on the critic's ranks, or the actor's without a
        critic. Raises Stopped or StoppedByRule, after saving, when the run has to end earlier;
        WorkerError, RuntimeTimeout and RewardsFailed, without saving.
        """
        if self.config.validation.before and self.iteration == 0:
            self.validator.validate(self.iteration, version=0, own_line=True)
        while self.iteration < self.config.training.train_iters:
            self.iteration += 1
            started = time.monotonic()
            self.stop.begin_iteration()

            self.rollout.update_weights(self.actor, self.config.count_updates(self.iteration - 1))
            collected = self.collector.collect()
            rollouts, lengths = collected.rollouts, collected.responses
            old = self.actor.log_probs(rollouts, lengths) if self._recompute else None
            ref = self.ref.log_probs(rollouts, lengths) if self.ref else None
            values = self.critic.values(rollouts, lengths) if self.critic else None

            inputs = ExperienceInputs(
                rollouts=as_rows_field(collected.rollouts),
                old=as_rows_field(old.rows() if old else None),
                ref=as_rows_field(ref.rows() if ref else None),
                scores=as_rows_field(collected.scores),
                values=as_rows_field(values.rows() if values else None),
                greedy=as_rows_field(collected.greedy),
                greedy_scores=as_rows_field(collected.greedy_scores),
                kl_coef=self.kl.value,
                slot_limit=self._slot_limit(collected),
                token_log=self.recorder.token_log(self.iteration, collected.sample_ids()),
            )
            experience = (self.critic or self.actor).make_experience(inputs)
            for producer in (old, ref, values):
                if producer is not None:
                    experience.after(producer)  # whose time is no part of this phase's deadline
            learned = experience.rows()
            updates = {}
            if self.critic:
                updates["critic"] = self.critic.update_critic(
                    rollouts, learned, lengths, self.iteration
                )
            if trains_actor := self.iteration > self.config.warmup_iters:
                updates["actor"] = self.actor.update_policy(
                    rollouts, learned, lengths, self.iteration, self.kl.value
                )
            if self.iteration < self.config.training.train_iters:
                self.prompts.read_ahead()  # while the ranks compute

            group_size = self.config.actor_rollout.n_samples_per_prompt
            measured = {
                **self.collector.metrics(collected),
                **names.rollout_metrics(collected.responses()),
                **(names.log_prob_metrics(old.result()) if old else {}),
                **names.score_metrics(collected.score_report()),
                **names.source_metrics(collected.score_report(), collected.data_sources()),
                **names.group_metrics(collected.score_report(), group_size),
                **names.experience_metrics(experience.result(), self.kl.value),
            }
            for role, update in updates.items():
                measured |= names.update_metrics(role, update.result()[0])
            if trains_actor:
                stood = measured["actor/lr"] == 0 or measured["actor/grad_norm"] == 0
                self.rollout.moved = not (stood or measured.get("actor/skipped_steps"))
            # The KL of a policy that does not change is no reason to change the coefficient.
            if self.ref and trains_actor:
                self.kl.update(measured["critic/kl"], self.config.samples_per_iteration)
            calls = {
                "old_log_prob": old,
                "ref": ref,
                "values": values,
                "adv": experience,
                **{f"update_{role}": update for role, update in updates.items()},
            }
            phases = {**collected.calls(), **{k: [call] for k, call in calls.items() if call}}
            self._finish_iteration(measured, collected, phases, time.monotonic() - started)
        self.checkpoints.settle(self.recorder.note)

    def _finish_iteration(
        self,
        measured: dict[str, float],
        collected: Collected,
        phases: dict[str, list[Pending]],
        all_s: float,
    ) -> None:
        """Write the iteration's metrics, samples and prompts; validate and save when due.

        Adds metrics to `measured`. `phases` has the iteration's calls by name, `all_s` its seconds.

        Raises:
            Stopped: After saving, if the run has to end here (`StopRequest`); never in the last
                iteration.
            StoppedByRule: Likewise, by `logging.stop_on`.
            LockLost: Before anything is written.
        """
        lock.require(self.checkpoints.directory.path)  # first of all: the rest writes files there
        driver = {"iteration": (time.time() - all_s, all_s)}
        reports, work = collected.generate_reports(), done_work(phases)
        flops = generation_flops(self.config, reports) + work.flops
        peak = find_peak(reports[0].device) if self.config.actor_rollout.bf16 else None
        sizes = {pool: sum(processes) for pool, processes in self.config.resource_pool.items()}
        # Pools of a local runtime are the same processes and count once.
        is_local = self.config.runtime.kind == "local"
        num_devices = max(sizes.values()) if is_local else sum(sizes.values())
        measured |= phase_metrics(phases)
        measured |= {"timing/sync": collected.sync_s(), "timing/all": all_s}
        measured |= idle_metrics(phases, sizes, all_s)
        measured["throughput/computed_tokens"] = float(work.tokens)
        measured |= names.throughput_metrics(reports, flops, all_s, num_devices, peak)
        self.recorder.write_samples(
            self.iteration,
            self.actor,
            collected.rollouts,
            [collected.score_report()],
            collected.sample_fields(),
        )
        self.recorder.warn_of_non_finite(self.iteration, measured, collected.non_finite_scores())
        last = self.iteration == self.config.training.train_iters
        validation = self.config.validation
        due = validation.interval and self.iteration % validation.interval == 0
        if due or (last and validation.after):
            began = time.time()
            version = self.config.count_updates(self.iteration)
            measured.update(self.validator.validate(self.iteration, version))
            driver["validation"] = began, time.time() - began
        if found := self.recorder.check_health(self.iteration, measured):
            self.stop.request(found.rule, f"{found.text}; {found.remedy}")
        self.stop.end_iteration(self.iteration)
        stops, note = not last and self.stop.is_due(), self.recorder.note
        saves = self.stop.agree(self.checkpoints.is_due(self.iteration, stops))
        self.checkpoints.settle(note)
        if saves:
            began = time.time()
            measured["timing/save"] = self.checkpoints.write(self.iteration, note)
            driver["save"] = began, measured["timing/save"]
        self.recorder.write_consumed(self.iteration, self.prompts.pop_consumed())
        self.recorder.write_iteration(self.iteration, measured, all_s)
        self.recorder.write_timeline(self.iteration, driver)
        if saves:
            score = validation_score(measured, validation.best_metric)
            self.checkpoints.commit(self.iteration, self.state_dict(), score, note)
            if stops:
                self.checkpoints.settle(note)
            # Seconds of a save that is waited for, as the last one of a run is.
            whole_s = measured["timing/save"] + self.checkpoints.write_s
            self.stop.record_save(self.checkpoints.newest, whole_s)
        if stops:
            raise self.stop.ended()

    def _slot_limit(self, collected: Collected) -> int:
        if self.config.algorithm.score_slot_limit == "batch_width":
            return max(collected.responses().responses)
        return self.config.actor_rollout.max_new_tokens

    def state_dict(self) -> dict[str, Any]:
        """Return iteration, KL coefficient and prompt position, for a checkpoint (JSON)."""
        return {
            "iteration": self.iteration,
            "kl": {"value": self.kl.value},
            "prompts": self.prompts.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the result of `state_dict`."""
        self.iteration = state["iteration"]
        self.kl.value = float(state["kl"]["value"])
        self.prompts.load_state_dict(state["prompts"])
