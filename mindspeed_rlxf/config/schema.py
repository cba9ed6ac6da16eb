"""The typed configuration of a run. The sections hold every default; YAML holds differences.

`resolve` builds it from a composed YAML tree; nothing changes it afterwards.
"""

from math import gcd
from pathlib import Path
from typing import Annotated

from mindspeed_rlxf.config.algorithm import AlgorithmConfig, KlControlConfig
from mindspeed_rlxf.config.architecture import ArchitectureConfig
from mindspeed_rlxf.config.enums import (
    CONFIGURED,
    LossNormalizer,
    OldLogProbs,
    RewardKind,
    Role,
    Stage,
    Verifier,
)
from mindspeed_rlxf.config.fields import Section, Word, free, key, reshard
from mindspeed_rlxf.config.rank_layout import ParallelLayout, count_per_node
from mindspeed_rlxf.config.ray_cluster import choose_cluster
from mindspeed_rlxf.config.reward_section import FunctionConfig, RewardConfig, SandboxConfig
from mindspeed_rlxf.config.roles import (
    ActorConfig,
    CriticConfig,
    LearningConfig,
    OffloadConfig,
    OptimizerConfig,
    RefConfig,
    RoleConfig,
)
from mindspeed_rlxf.config.sections import (
    DataConfig,
    DeviceConfig,
    LoggingConfig,
    PlanConfig,
    PoolSettings,
    RolloutConfig,
    RuntimeConfig,
    TrainingConfig,
    ValidationConfig,
)

__all__ = [
    "ActorConfig", "AlgorithmConfig", "ArchitectureConfig", "CriticConfig", "DataConfig",
    "DeviceConfig", "FunctionConfig", "KlControlConfig", "LearningConfig", "LoggingConfig",
    "OffloadConfig", "OptimizerConfig", "PlanConfig", "PoolSettings", "RefConfig", "RewardConfig",
    "RoleConfig", "RolloutConfig", "RunConfig", "RuntimeConfig", "SandboxConfig",
    "TrainingConfig", "ValidationConfig",
]  # fmt: skip


SAVED_AS = {Role.ACTOR_ROLLOUT: "actor", Role.CRITIC: "critic"}
"""Names of the trained roles' subfolders in folders of weights."""


class RunConfig(Section):
    """The complete, checked configuration of a run."""

    name: str = free(..., "config name")
    training: TrainingConfig = key(..., "the run as a whole")
    algorithm: AlgorithmConfig = key(AlgorithmConfig(), "rewards, advantages and losses")
    actor_rollout: ActorConfig = key(..., "the policy")
    ref: RefConfig = key(..., "the frozen policy")
    critic: CriticConfig | None = key(None, "the value model; none where the stage has no critic")
    reward: RewardConfig = key(..., "what scores responses")
    placement: dict[Annotated[Role, Word], str] = reshard(..., "role -> pool, every role")
    resource_pool: dict[str, list[int]] = reshard(..., "pool -> processes per node")
    rollout: RolloutConfig = key(RolloutConfig(), "generation on devices of its own")
    pool_settings: PoolSettings = free(PoolSettings(), "the other keys of resource_pool")
    data: DataConfig = key(..., "prompts")
    validation: ValidationConfig = key(ValidationConfig(), "when to validate")
    logging: LoggingConfig = key(LoggingConfig(), "what is written down")
    device: DeviceConfig = key(DeviceConfig(), "what the workers compute on")
    runtime: RuntimeConfig = key(RuntimeConfig(), "what starts the workers")
    plan: PlanConfig = free(PlanConfig(), "what a dry run suggests")
    dry_run: bool = free(False, "print the plan and every problem, then stop")

    @property
    def compares_pairs(self) -> bool:
        """Whether the stage is online DPO."""
        return self.training.stage is Stage.RAY_ONLINE_DPO

    @property
    def compares_responses(self) -> bool:
        """Whether the estimator compares the responses to a prompt, or online DPO does."""
        return self.compares_pairs or self.algorithm.estimator.compares_group

    @property
    def samples_per_iteration(self) -> int:
        """Number of responses per iteration over all ranks."""
        return self.training.global_batch_size * self.actor_rollout.n_samples_per_prompt

    @property
    def old_log_probs(self) -> OldLogProbs:
        """Source of the old log-probs, with the key's value `auto` decided for this run.

        Another value than `auto` is returned as it is. AUTO as a result: there is no pass before
        the update, whose own log-probs are the old ones, with ratio 1. That needs no limit of
        log-prob gaps, and, except in online DPO, whose loss has no ratio, an iteration of one
        optimizer step, no importance weight and no KL penalty in the reward. Else RECOMPUTE.
        """
        algorithm, actor = self.algorithm, self.actor_rollout
        if algorithm.old_log_probs is not OldLogProbs.AUTO:
            return algorithm.old_log_probs
        steps = actor.ppo_epochs * self.samples_per_iteration // actor.ppo_mini_batch_size
        penalised = algorithm.kl_in == "reward" and algorithm.kl_ctrl.kl_coef > 0
        compared = (algorithm.rollout_is_threshold or algorithm.max_log_prob_gap) is not None
        reads = compared or (not self.compares_pairs and (steps > 1 or penalised))
        return OldLogProbs.RECOMPUTE if reads else OldLogProbs.AUTO

    @property
    def roles(self) -> list[Role]:
        """Roles with a section that run: all that have a pool in `placement`, in fixed order."""
        return [role for role in CONFIGURED if role in self.placement]

    @property
    def value_model(self) -> CriticConfig:
        """Section of the critic. AssertionError if the configuration has none."""
        assert self.critic is not None, f"stage {self.training.stage.value} has no critic"
        return self.critic

    @property
    def joins_cluster(self) -> bool:
        """Whether the run joins a Ray cluster, and does not start one."""
        address = self.runtime.kind == "ray" and choose_cluster(self.runtime.address).address
        return bool(address)

    @property
    def reads_reference(self) -> bool:
        """Whether a reward or a loss reads the reference's log-probs."""
        return self.compares_pairs or self.algorithm.kl_ctrl.kl_coef > 0

    @property
    def generates(self) -> bool:
        """Whether some responses are generated, in spite of `fixed_responses`."""
        greedy = self.algorithm.estimator.reads_greedy
        fixed = self.actor_rollout.fixed_responses is not None
        return greedy or self.has_validation_prompts or not fixed

    @property
    def reads_reward_rules(self) -> bool:
        """Whether `reward.rules` scores responses in training or validation."""
        validates = self.has_validation_prompts and self.validation.reward is not RewardKind.MODEL
        return self.reward.runs_code or validates

    @property
    def has_validation_prompts(self) -> bool:
        return bool(self.data.val_files or self.data.val_data_path)

    @property
    def warmup_iters(self) -> int:
        """Number of first iterations in which only the critic learns; 0 without a critic."""
        return self.critic.warmup_iters if self.critic else 0

    def learning_iters(self, role: Role) -> int:
        """Return in how many of the run's iterations a trained role is updated."""
        return self.training.train_iters - (self.warmup_iters if role is Role.ACTOR_ROLLOUT else 0)

    def count_updates(self, iteration: int) -> int:
        """Return how many of the iterations 1 to `iteration` update the actor."""
        return max(0, iteration - self.warmup_iters)

    @property
    def samples_together(self) -> int:
        """Number of consecutive samples that must be on one data-parallel rank.

        `n_samples_per_prompt` if the estimator compares a group, and in online DPO; else 1.
        """
        return self.actor_rollout.n_samples_per_prompt if self.compares_responses else 1

    def shared_samples(self, role: Role, samples: int) -> int:
        """Return how many consecutive samples of a prompt a rank computes it for once, 1 = none.

        samples: of an epoch or mini-batch on one rank. Consecutive samples of the returned number
        stay in one micro-batch, so it divides `samples`.
        """
        section = self.role(role)
        if not (section.share_prompts and section.packed_sequences):
            return 1
        size = 0 if section.max_tokens_per_micro_batch else section.micro_batch_size
        return gcd(self.actor_rollout.n_samples_per_prompt, samples, size)

    def shares_in_updates(self, role: Role) -> bool:
        """Whether responses to a prompt are certainly neighbours in the updates of a role."""
        section = self.role(role)
        assert isinstance(section, LearningConfig) and section.architecture is not None
        return not (section.shuffle_minibatch or section.architecture.balances_experts)

    def kept_together(self, role: Role) -> int:
        """Return how many consecutive samples of a mini-batch must be in one micro-batch.

        micro_batch_size where the loss of a micro-batch is not a sum over its samples (a mean, or
        load balancing of experts) and the role has no token limit; else 2 for the actor in online
        DPO; else 1.
        """
        section = self.role(role)
        means = self.algorithm.loss_normalizer is LossNormalizer.MICRO_BATCH_MEAN
        experts = section.architecture is not None and section.architecture.balances_experts
        if (means or experts) and section.max_tokens_per_micro_batch is None:
            return section.micro_batch_size
        return 2 if role is Role.ACTOR_ROLLOUT and self.compares_pairs else 1

    @property
    def verifiers(self) -> list[tuple[Verifier, float]]:
        """(rule, weight) of the rules that score every prompt; [] = the data source chooses one.

        [] without `reward.verifier`. With it but without `verifier_function` the one rule is `acc`.
        The weights are `verifier_weight`; without it each is 1.
        """
        if not self.reward.verifier:
            return []
        rules = self.algorithm.verifier_function or (Verifier.ACC,)
        return list(zip(rules, self.algorithm.verifier_weight or [1.0] * len(rules), strict=False))

    @property
    def shared_save(self) -> str | None:
        """Folder that is `save` of both actor and critic; None if theirs differ or one has none."""
        actor, critic = self.actor_rollout.save, self.critic and self.critic.save
        return actor if actor is not None and actor == critic else None

    def save_folder(self, role: Role) -> Path | None:
        """Return the folder for the final weights of a trained role: its `save`.

        If actor and critic have the same `save`, its subfolder for the role. None without `save`:
        the weights then go into the run directory.
        """
        section = self.actor_rollout if role is Role.ACTOR_ROLLOUT else self.value_model
        if section.save is None:
            return None
        return Path(section.save) / (SAVED_AS[role] if self.shared_save else "")

    def role(self, role: Role) -> RoleConfig:
        """Return the section of a role. AssertionError where it is None, as `critic` may be."""
        section = getattr(self, role.value)
        assert isinstance(section, RoleConfig)
        return section

    def roles_of(self, pool: str) -> list[Role]:
        """List the roles that share the processes of a pool, in the order of `Role`."""
        return [role for role in self.roles if self.placement[role] == pool]

    def layout(self, role: Role) -> ParallelLayout:
        """Return ranks, TP and PP of a role; of the actor only the ranks that train count."""
        section = self.role(role)
        return ParallelLayout(
            world_size=sum(self.processes_of(role)),
            tp=section.tensor_model_parallel_size,
            pp=section.pipeline_model_parallel_size,
        )

    def processes_of(self, role: Role) -> list[int]:
        """Return how many processes a role has on each node of its pool.

        Of the actor in a disaggregated pool only the first processes count, which train, and nodes
        without any are left out. KeyError if the role does not run or its pool does not exist.
        """
        processes = self.resource_pool[self.placement[role]]
        if role is Role.ACTOR_ROLLOUT and self.parts:
            return count_per_node(processes, 0, self.parts[0])
        return processes

    @property
    def parts(self) -> tuple[int, int] | None:
        """Numbers of ranks of the actor's pool that (train, generate) if it is split.

        None = not split, all ranks do both; also where only one of the two keys is set.
        """
        train, infer = self.actor_rollout.num_gpus_for_train, self.actor_rollout.num_gpus_for_infer
        return None if train is None or infer is None else (train, infer)

    @property
    def rollout_tp(self) -> int:
        """Tensor-parallel size of generation: that of `rollout` if set, else the actor's."""
        actor = self.actor_rollout
        return self.rollout.tensor_model_parallel_size or actor.tensor_model_parallel_size

    @property
    def rollout_ep(self) -> int:
        """Number of replicas that share the experts of a layer in generation; 1 = not shared.

        That of `rollout` if set; else 1 in a disaggregated pool, and otherwise the actor's.
        """
        usual = 1 if self.parts else self.actor_rollout.expert_model_parallel_size
        return self.rollout.expert_model_parallel_size or usual

    @property
    def rollout_layout(self) -> ParallelLayout:
        """Parallel layout of the ranks that generate, with `rollout_tp` and without a pipeline.

        The ranks are those of the actor, or in a disaggregated pool those that only generate.
        """
        generating = self.parts[1] if self.parts else self.layout(Role.ACTOR_ROLLOUT).world_size
        return ParallelLayout(generating, self.rollout_tp)
