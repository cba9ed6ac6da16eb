"""The PPO loop."""

from __future__ import annotations

import time
from typing import Any

from mindspeed_rlxf.algorithms.kl import KlController
from mindspeed_rlxf.config.enums import KlControl, OldLogProbs, RuntimeKind, ScoreSlotLimit
from mindspeed_rlxf.config.schema import RunConfig
from mindspeed_rlxf.roles.reports import GenerateReport
from mindspeed_rlxf.runtime.group import Pending
from mindspeed_rlxf.runtime.refs import RowsRef
from mindspeed_rlxf.runtime.role_groups import RoleGroups
from mindspeed_rlxf.trainer import metrics as names
from mindspeed_rlxf.trainer.prompt_source import PromptSource
from mindspeed_rlxf.trainer.recorder import Recorder
from mindspeed_rlxf.trainer.validation import Validator


class PpoTrainer:
    """Drives the roles through `train_iters` iterations; holds references to rows, no tensors."""

    def __init__(
        self,
        config: RunConfig,
        roles: RoleGroups,
        prompts: PromptSource,
        validator: Validator,
        recorder: Recorder,
    ) -> None:
        self.config, self.prompts = config, prompts
        self.actor, self.ref, self.critic, self.reward = (
            roles.actor,
            roles.ref,
            roles.critic,
            roles.reward,
        )
        self.validator, self.recorder = validator, recorder
        control = config.algorithm.kl_ctrl
        self.kl = KlController(
            control.kl_coef,
            control.type is KlControl.ADAPTIVE,
            control.target_kl,
            float(control.horizon),
        )
        self.iteration = 0

    def fit(self) -> None:
        """generate -> log-probs, values, scores -> experience -> updates -> metrics."""
        if self.config.validation.before:
            self.validator.validate(self.iteration)
        while self.iteration < self.config.training.train_iters:
            self.iteration += 1
            started = time.monotonic()

            generated = self.actor.generate(self.prompts.next_prompts(), self.config.training.seed)
            rollouts = generated.rows()
            old = self.actor.log_probs(rollouts) if self._recompute else None
            ref = self.ref.log_probs(rollouts)
            values = self.critic.values(rollouts)
            scores = self.reward.score(rollouts)

            experience = self.critic.make_experience(
                rollouts,
                old.rows() if old else None,
                ref.rows(),
                values.rows(),
                scores.rows(),
                self.kl.value,
                self._slot_limit(generated.result()),
            )
            learned = experience.rows()
            critic_update = self.critic.update_critic(rollouts, learned, self.iteration)
            actor_update = self.actor.update_policy(rollouts, learned, self.iteration)

            measured = {
                **names.rollout_metrics(generated.result()),
                **(names.log_prob_metrics(old.result()) if old else {}),
                **names.score_metrics(scores.result()),
                **names.experience_metrics(experience.result(), self.kl.value),
                **names.update_metrics("critic", critic_update.result()[0]),
                **names.update_metrics("actor", actor_update.result()[0]),
            }
            self.kl.update(measured["critic/kl"], self.config.samples_per_iteration)
            phases = {
                "gen": generated,
                "old_log_prob": old,
                "ref": ref,
                "values": values,
                "reward": scores,
                "adv": experience,
                "update_critic": critic_update,
                "update_actor": actor_update,
            }
            measured.update({f"timing/{k}": p.seconds for k, p in phases.items() if p})
            self._finish(measured, rollouts, generated, scores, time.monotonic() - started)

    def _finish(
        self,
        measured: dict[str, float],
        rollouts: RowsRef,
        generated: Pending,
        scores: Pending,
        all_s: float,
    ) -> None:
        """Write the iteration down; validate where it is due."""
        reports = generated.result()
        measured["timing/sync"] = max(report.sync_s for report in reports)
        measured["timing/all"] = all_s
        measured.update(names.throughput_metrics(reports, all_s, self._num_devices))
        self.recorder.samples(self.iteration, self.actor, rollouts, scores.result())
        last = self.iteration == self.config.training.train_iters
        validation = self.config.validation
        due = validation.interval and self.iteration % validation.interval == 0
        if due or (last and validation.after):
            measured.update(self.validator.validate(self.iteration))
        self.recorder.iteration(self.iteration, measured, all_s)

    @property
    def _num_devices(self) -> int:
        """Devices of all pools; the pools of a local runtime are the same processes."""
        sizes = [sum(processes) for processes in self.config.resource_pool.values()]
        return max(sizes) if self.config.runtime.kind is RuntimeKind.LOCAL else sum(sizes)

    @property
    def _recompute(self) -> bool:
        return self.config.algorithm.old_log_probs is OldLogProbs.RECOMPUTE

    def _slot_limit(self, generated: list[GenerateReport]) -> int:
        if self.config.algorithm.score_slot_limit is ScoreSlotLimit.BATCH_WIDTH:
            return max(n for report in generated for n in report.response_lengths)
        return self.config.actor_rollout.max_new_tokens

    def state_dict(self) -> dict[str, Any]:
        """What the driver has to remember to go on as the same run."""
        return {
            "iteration": self.iteration,
            "kl": self.kl.state_dict(),
            "prompts": self.prompts.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.iteration = state["iteration"]
        self.kl.load_state_dict(state["kl"])
        self.prompts.load_state_dict(state["prompts"])
