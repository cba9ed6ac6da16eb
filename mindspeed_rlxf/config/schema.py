"""The typed run configuration. Sections hold every default; YAML holds differences.

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
from mindspeed_rlxf.config.lora import LoraConfig
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
from mindspeed_rlxf.config.rollout_section import RolloutConfig, VllmConfig
from mindspeed_rlxf.config.sections import (
    DataConfig,
    DeviceConfig,
    LoggingConfig,
    PlanConfig,
    PoolSettings,
    RuntimeConfig,
    TrainingConfig,
    ValidationConfig,
)

__all__ = [
    "ActorConfig", "AlgorithmConfig", "ArchitectureConfig", "CriticConfig", "DataConfig",
    "DeviceConfig", "FunctionConfig", "KlControlConfig", "LearningConfig", "LoggingConfig",
    "LoraConfig", "OffloadConfig", "OptimizerConfig", "PlanConfig", "PoolSettings", "RefConfig",
    "RewardConfig", "RoleConfig", "RolloutConfig", "RunConfig", "RuntimeConfig", "SandboxConfig",
    "TrainingConfig", "ValidationConfig", "VllmConfig",
]  # fmt: skip


SAVED_AS = {Role.ACTOR_ROLLOUT: "actor", Role.CRITIC: "critic"}
"""Trained roles' subfolders in weight folders."""


class RunConfig(Section):
    """A run's complete, checked configuration."""

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
        """Whether the estimator, or online DPO, compares a prompt's responses."""
        return self.compares_pairs or self.algorithm.estimator.compares_group

    @property
    def samples_per_iteration(self) -> int:
        """Responses per iteration over all ranks."""
        return self.training.global_batch_size * self.actor_rollout.n_samples_per_prompt

    @property
    def old_log_probs(self) -> OldLogProbs:
        """Source for the old log-probs, with the key's value `auto` decided for this run.

        AUTO as a result means no pass before the update: its own log-probs are the old ones, at
        ratio 1. Log-prob gap limits, importance weights and rejection rule it out, and so do,
        except in online DPO (its loss has no ratio), several optimizer steps per iteration, a KL
        penalty in the reward and samples of older weights; then RECOMPUTE.
        """
        algorithm = self.algorithm
        actor = self.actor_rollout
        if algorithm.old_log_probs is not OldLogProbs.AUTO:
            return algorithm.old_log_probs
        steps = actor.ppo_epochs * self.samples_per_iteration // actor.ppo_mini_batch_size
        penalised = algorithm.kl_in == "reward" and algorithm.kl_ctrl.kl_coef > 0
        limits = algorithm.rollout_is_threshold, algorithm.max_log_prob_gap
        compared = algorithm.rollout_rejection or any(limit is not None for limit in limits)
        reuses = steps > 1 or penalised or self.rollout.max_staleness > 0
        reads = compared or (reuses and not self.compares_pairs)
        return OldLogProbs.RECOMPUTE if reads else OldLogProbs.AUTO

    @property
    def lead(self) -> int:
        """Batches that generation completes before the previous one's update starts: 0 or 1.

        With 1, batch i + 1 is generated while update i runs. `rollout.lead` if set; else 1 in
        disaggregated placement with `rollout.max_staleness` of 1 or more, and otherwise 0.
        """
        if self.rollout.lead is not None:
            return self.rollout.lead
        return min(self.rollout.max_staleness, 1) if self.train_rollout_split else 0

    @property
    def roles(self) -> list[Role]:
        """Running roles with a section (those in `placement`), in fixed order."""
        return [role for role in CONFIGURED if role in self.placement]

    @property
    def value_model(self) -> CriticConfig:
        """The critic's section. AssertionError without a critic."""
        assert self.critic is not None, f"stage {self.training.stage.value} has no critic"
        return self.critic

    @property
    def joins_cluster(self) -> bool:
        """Whether the run joins a Ray cluster instead of starting one."""
        address = self.runtime.kind == "ray" and choose_cluster(self.runtime.address).address
        return bool(address)

    @property
    def counts_hosts(self) -> bool:
        """Whether the devices of a host matter: the run joins a cluster, or is planned for one."""
        return self.joins_cluster or self.device.memory_gib is not None

    @property
    def reads_reference(self) -> bool:
        """Whether a reward or loss reads the reference's log-probs."""
        return self.compares_pairs or self.algorithm.kl_ctrl.kl_coef > 0

    @property
    def shares_reference(self) -> bool:
        """Whether the reference is the actor's model with its adapters switched off."""
        return Role.REF in self.placement and self.actor_rollout.lora.rank > 0

    @property
    def generates(self) -> bool:
        """Whether some responses are generated despite `fixed_responses`."""
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
        """Whether the configuration names validation prompts."""
        return bool(self.data.val_files or self.data.val_data_path)

    @property
    def warmup_iters(self) -> int:
        """First iterations with critic updates only; 0 without a critic."""
        return self.critic.warmup_iters if self.critic else 0

    @property
    def critic_iters(self) -> int:
        """First iterations, which update the critic, if there is one."""
        freeze_after = self.critic.freeze_after if self.critic else None
        return min(freeze_after or self.training.train_iters, self.training.train_iters)

    def learning_iters(self, role: Role) -> int:
        """Return how many iterations update a trained role."""
        if role is Role.CRITIC:
            return self.critic_iters
        return self.training.train_iters - self.warmup_iters

    def count_updates(self, iteration: int) -> int:
        """Return how many of the iterations 1 to `iteration` update the actor."""
        return max(0, iteration - self.warmup_iters)

    @property
    def samples_together(self) -> int:
        """Consecutive samples kept on one data-parallel rank.

        `n_samples_per_prompt` if responses are compared (`compares_responses`), else 1.
        """
        return self.actor_rollout.n_samples_per_prompt if self.compares_responses else 1

    def shared_samples(self, role: Role, samples: int) -> int:
        """Return how many consecutive samples share one prompt computation; 1 = no sharing.

        They stay on one rank and in one micro-batch, so the number divides `samples`.

        Args:
            role: A role with a model.
            samples: Samples per epoch or mini-batch on one rank.
        """
        section = self.role(role)
        shares = section.share_prompts and section.backend == "megatron"
        if not (shares and section.packed_sequences):
            return 1
        size = 0 if section.max_tokens_per_micro_batch else section.micro_batch_size
        return gcd(self.actor_rollout.n_samples_per_prompt, samples, size)

    def shares_in_updates(self, role: Role) -> bool:
        """Whether a prompt's responses are certainly neighbours in a role's updates."""
        section = self.role(role)
        assert isinstance(section, LearningConfig) and section.architecture is not None
        return not (section.shuffle_minibatch or section.architecture.balances_experts)

    def kept_together(self, role: Role) -> int:
        """Return how many consecutive samples in a mini-batch must share a micro-batch.

        `micro_batch_size` if the micro-batch loss is no sum over samples (a mean, or expert load
        balancing) and the role has no token limit; else 2 for the actor in online DPO; else 1.
        """
        section = self.role(role)
        means = self.algorithm.loss_normalizer is LossNormalizer.MICRO_BATCH_MEAN
        experts = section.architecture is not None and section.architecture.balances_experts
        if (means or experts) and section.max_tokens_per_micro_batch is None:
            return section.micro_batch_size
        return 2 if role is Role.ACTOR_ROLLOUT and self.compares_pairs else 1

    @property
    def verifiers(self) -> list[tuple[Verifier, float]]:
        """(rule, weight) pairs for scoring every prompt; [] = the data source chooses a rule.

        [] without `reward.verifier`. The default is `acc` alone, and weight 1 for each rule.
        """
        if not self.reward.verifier:
            return []
        rules = self.algorithm.verifier_function or (Verifier.ACC,)
        return list(zip(rules, self.algorithm.verifier_weight or [1.0] * len(rules), strict=False))

    @property
    def shared_save(self) -> str | None:
        """The folder named as `save` by both actor and critic, else None."""
        actor_save = self.actor_rollout.save
        critic_save = None if self.critic is None else self.critic.save
        return actor_save if actor_save == critic_save else None

    def save_folder(self, role: Role) -> Path | None:
        """Return the folder for a trained role's final weights: its `save`.

        A `save` shared by actor and critic has a subfolder per role. None without `save`; the
        weights then go into the run directory.
        """
        section = self.actor_rollout if role is Role.ACTOR_ROLLOUT else self.value_model
        if section.save is None:
            return None
        return Path(section.save) / (SAVED_AS[role] if self.shared_save else "")

    def role(self, role: Role) -> RoleConfig:
        """Return a role's section; a shared reference has the actor's.

        AssertionError if it is None, as `critic` may be.
        """
        shared = role is Role.REF and self.shares_reference
        section = self.actor_rollout if shared else getattr(self, role.value)
        assert isinstance(section, RoleConfig)
        return section

    def roles_of(self, pool: str) -> list[Role]:
        """List the roles in a pool, in `Role` order."""
        return [role for role in self.roles if self.placement[role] == pool]

    def layout(self, role: Role) -> ParallelLayout:
        """Return a role's ranks, TP, CP and PP; for the actor only training ranks count."""
        section = self.role(role)
        return ParallelLayout(
            world_size=sum(self.processes_of(role)),
            tp=section.tensor_model_parallel_size,
            pp=section.pipeline_model_parallel_size,
            cp=section.context_parallel_size,
        )

    def backend_of(self, pool: str) -> str:
        """Return the training engine of a pool's processes; one without a model has Megatron's."""
        for role in self.roles_of(pool):
            section = self.role(role)
            if section.architecture is not None and section.backend == "fsdp":
                return "fsdp"
        return "megatron"

    def processes_of(self, role: Role) -> list[int]:
        """Return a role's process count on each node in its pool.

        In disaggregated placement only the training processes count for the actor and a shared
        reference, and nodes without any are left out. KeyError if the role does not run or its pool
        does not exist.
        """
        processes = self.resource_pool[self.placement[role]]
        trains = role is Role.ACTOR_ROLLOUT or (role is Role.REF and self.shares_reference)
        if trains and self.train_rollout_split:
            return count_per_node(processes, 0, self.train_rollout_split[0])
        return processes

    @property
    def train_rollout_split(self) -> tuple[int, int] | None:
        """Ranks of the actor's pool for (training, generation) in disaggregated placement: (6, 2).

        None if all ranks do both, or only one key is set.
        """
        train = self.actor_rollout.num_gpus_for_train
        infer = self.actor_rollout.num_gpus_for_infer
        return None if train is None or infer is None else (train, infer)

    @property
    def rollout_tp(self) -> int:
        """Tensor-parallel size in generation: `rollout`'s if set, else the actor's."""
        if self.runs_vllm and self.rollout.vllm.tensor_parallel_size:
            return self.rollout.vllm.tensor_parallel_size
        rollout_tp = self.rollout.tensor_model_parallel_size
        return rollout_tp or self.actor_rollout.tensor_model_parallel_size

    @property
    def counts_failures(self) -> bool:
        """Whether a sample may fail alone: by functions that score, or by its agent."""
        return self.reward.runs_code or self.rollout.runs_agents

    @property
    def runs_programs(self) -> bool:
        """Whether a reward or a tool runs programs of the model in the sandbox."""
        return self.reward.runs_programs or self.rollout.runs_python

    @property
    def runs_vllm(self) -> bool:
        """Whether vLLM servers generate."""
        return self.rollout.engine == "vllm"

    @property
    def makes_decode_graphs(self) -> bool:
        """Whether decode steps of the native engine are graphs, where the device has them."""
        is_plain = self.rollout_tp == 1 and not self.actor_rollout.architecture.num_experts
        is_native = self.rollout.engine == "native"
        asked = self.rollout.decode_graphs and not self.training.deterministic
        return asked and is_native and is_plain

    @property
    def rollout_ep(self) -> int:
        """Replicas sharing a layer's experts in generation; 1 = not shared.

        `rollout`'s if set; else 1 in disaggregated placement, and otherwise the actor's.
        """
        usual = 1 if self.train_rollout_split else self.actor_rollout.expert_model_parallel_size
        return self.rollout.expert_model_parallel_size or usual

    @property
    def rollout_layout(self) -> ParallelLayout:
        """Generating ranks in their layout, with `rollout_tp` and no pipeline parallelism."""
        if self.train_rollout_split is not None:
            _, generating = self.train_rollout_split
        else:
            generating = self.layout(Role.ACTOR_ROLLOUT).world_size
        return ParallelLayout(generating, self.rollout_tp)
