"""The typed configuration of a run. Every default lives in the sections; YAML holds differences.

`resolve` builds it from a composed YAML tree; nothing changes it afterwards.
"""

from __future__ import annotations

from typing import Annotated

from mindspeed_rlxf.config.enums import Role, Stage
from mindspeed_rlxf.config.fields import Section, Word, key
from mindspeed_rlxf.config.layout import ParallelLayout
from mindspeed_rlxf.config.roles import (
    ActorConfig,
    ArchitectureConfig,
    CriticConfig,
    OptimizerConfig,
    RefConfig,
    RewardConfig,
    RoleConfig,
)
from mindspeed_rlxf.config.sections import (
    AlgorithmConfig,
    DataConfig,
    DeviceConfig,
    KlControlConfig,
    LoggingConfig,
    PoolSettings,
    RuntimeConfig,
    TrainingConfig,
    ValidationConfig,
)

__all__ = [
    "ActorConfig",
    "AlgorithmConfig",
    "ArchitectureConfig",
    "CriticConfig",
    "DataConfig",
    "DeviceConfig",
    "KlControlConfig",
    "LoggingConfig",
    "OptimizerConfig",
    "PoolSettings",
    "RefConfig",
    "RewardConfig",
    "RoleConfig",
    "RunConfig",
    "RuntimeConfig",
    "TrainingConfig",
    "ValidationConfig",
]


class RunConfig(Section):
    """Everything a run needs, complete and checked."""

    name: str = key(..., "config name", "free")
    training: TrainingConfig = key(..., "the run as a whole")
    algorithm: AlgorithmConfig = key(AlgorithmConfig(), "rewards, advantages and losses")
    actor_rollout: ActorConfig = key(..., "the policy")
    ref: RefConfig = key(..., "the frozen policy")
    critic: CriticConfig | None = key(None, "the value model; none where the stage has no critic")
    reward: RewardConfig = key(..., "what scores responses")
    placement: dict[Annotated[Role, Word], str] = key(..., "role -> pool, every role", "reshard")
    resource_pool: dict[str, list[int]] = key(..., "pool -> processes per node", "reshard")
    pool_settings: PoolSettings = key(PoolSettings(), "the other keys of resource_pool", "free")
    data: DataConfig = key(..., "prompts")
    validation: ValidationConfig = key(ValidationConfig(), "when to validate")
    logging: LoggingConfig = key(LoggingConfig(), "what is written down")
    device: DeviceConfig = key(DeviceConfig(), "what the workers compute on")
    runtime: RuntimeConfig = key(RuntimeConfig(), "what starts the workers")
    dry_run: bool = key(False, "print the plan and every problem, then stop", "free")

    @property
    def samples_per_iteration(self) -> int:
        """Responses per iteration over all ranks."""
        return self.training.global_batch_size * self.actor_rollout.n_samples_per_prompt

    @property
    def roles(self) -> list[Role]:
        """The roles of this run: without a critic where the stage has none."""
        return [role for role in Role if role in self.placement]

    @property
    def value_model(self) -> CriticConfig:
        """The critic of a run that has one."""
        assert self.critic is not None, f"stage {self.training.stage.value} has no critic"
        return self.critic

    @property
    def samples_together(self) -> int:
        """Neighbouring samples that have to stay on one data-parallel rank: those of a prompt."""
        compares = self.algorithm.adv_estimator.compares_group
        pairs = self.training.stage is Stage.RAY_ONLINE_DPO
        return self.actor_rollout.n_samples_per_prompt if compares or pairs else 1

    def role(self, role: Role) -> RoleConfig:
        """The section of a role."""
        section = getattr(self, role.value)
        assert isinstance(section, RoleConfig)
        return section

    def pool_of(self, role: Role) -> str:
        """The pool a role lives in."""
        return self.placement[role]

    def roles_of(self, pool: str) -> list[Role]:
        """Roles that share the processes of a pool, in the order of `Role`."""
        return [role for role in self.roles if self.placement[role] == pool]

    def pool_size(self, pool: str) -> int:
        """Processes of a pool, one per device."""
        return sum(self.resource_pool[pool])

    def layout(self, role: Role) -> ParallelLayout:
        """Where the ranks of a role's pool stand in its parallel groups."""
        section = self.role(role)
        return ParallelLayout(
            world_size=self.pool_size(self.pool_of(role)),
            tp=section.tensor_model_parallel_size,
            pp=section.pipeline_model_parallel_size,
        )
