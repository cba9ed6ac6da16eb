"""All roles in a run, as the driver calls them.

Each role file has the driver's group above the workers' class. Methods that return `RoleFuture`
submit a call without waiting; their docstrings name the row type (`RoleFuture.rows()`) and the
report type (`RoleFuture.result()`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from mindspeed_rlxf.cluster.interface import Pool
from mindspeed_rlxf.config.enums import Role
from mindspeed_rlxf.config.schema import RunConfig
from mindspeed_rlxf.reporting.phases import phase
from mindspeed_rlxf.roles.actor import ActorGroup
from mindspeed_rlxf.roles.critic import CriticGroup
from mindspeed_rlxf.roles.reference import ReferenceGroup
from mindspeed_rlxf.roles.reward import RewardGroup
from mindspeed_rlxf.roles.rollout import RolloutGroup
from mindspeed_rlxf.roles.scorer import ScorerRole


@dataclass(frozen=True)
class RoleGroups:
    """The groups for all roles; `ref` and `critic` are None if the run has none."""

    actor: ActorGroup
    rollout: RolloutGroup
    ref: ReferenceGroup | None
    critic: CriticGroup | None
    reward: RewardGroup

    @classmethod
    def build(
        cls,
        config: RunConfig,
        pools: Mapping[str, Pool],
        eos_token_ids: Sequence[int],
        scores_in_processes: bool = False,
        logs: str = "",
    ) -> RoleGroups:
        """Build every role in its pool's processes, all pools at once, and wait.

        With `scores_in_processes`, functions or rules score in separate processes during
        generation. `logs` is the folder for logs of servers.
        """
        policy = pools[config.placement[Role.ACTOR_ROLLOUT]]
        actor, rollout = ActorGroup(config, policy), RolloutGroup(config, policy)
        ref = critic = None
        if Role.REF in config.roles:
            ref = ReferenceGroup(config, pools[config.placement[Role.REF]])
        if config.critic is not None:
            critic = CriticGroup(config, pools[config.placement[Role.CRITIC]])
        beside = rollout.group if scores_in_processes else None
        reward = RewardGroup(config, pools[config.placement[Role.REWARD]], beside)
        with phase("loading the weights of the roles") as loaded:
            builds = [actor.build()]
            builds += [reward.scorers.build(ScorerRole, config)] if reward.scorers else []
            builds += [rollout.build(eos_token_ids, reward.scorers is not None, logs)]
            builds += reward.build()
            builds += [group.build() for group in (ref, critic) if group]
            loaded.total = len(builds)
            for build in builds:
                build.result()
                loaded.advance()
        return cls(actor, rollout, ref, critic, reward)
