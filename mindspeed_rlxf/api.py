"""The classes of verl's tutorial over this package: roles, pools, rewards and the trainer.

A script that imports these names in place of verl's runs as it is; the loop is `PpoTrainer.fit`.
Classes of the user reach the workers by pickle. Files of reward functions are read again where they
score, so a script stands under `if __name__ == "__main__":`.
"""

import inspect
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

from omegaconf import DictConfig, OmegaConf

from mindspeed_rlxf.config import enums
from mindspeed_rlxf.config.keys import Given, to_tree
from mindspeed_rlxf.config.load import resolve_given
from mindspeed_rlxf.config.mindspeed_llm import translate
from mindspeed_rlxf.config.problems import ConfigError, Problem
from mindspeed_rlxf.config.schema import RunConfig
from mindspeed_rlxf.config.verl import is_verl, translate_verl
from mindspeed_rlxf.data.files import count_rows
from mindspeed_rlxf.reporting.console import opened
from mindspeed_rlxf.reporting.jsonl import Sample
from mindspeed_rlxf.reporting.live import make_console
from mindspeed_rlxf.roles.actor import ActorRole
from mindspeed_rlxf.roles.critic import CriticRole
from mindspeed_rlxf.roles.own_roles import OWN_ROLES
from mindspeed_rlxf.roles.reference import ReferenceRole
from mindspeed_rlxf.roles.reward import RewardRole
from mindspeed_rlxf.roles.rollout import RolloutRole
from mindspeed_rlxf.trainer.ppo import PpoTrainer

ActorRolloutRefWorker = ActorRole
"""verl's name; it stands for the rollout and the reference too."""
CriticWorker = CriticRole
RewardModelWorker = RewardRole

ACTOR, ROLLOUT, RULE = enums.Role.ACTOR_ROLLOUT, enums.Role.ROLLOUT, enums.RewardKind.RULE
CLASSES: dict[enums.Role, type] = {
    ACTOR: ActorRole, ROLLOUT: RolloutRole, enums.Role.CRITIC: CriticRole,
    enums.Role.REF: ReferenceRole, enums.Role.REWARD: RewardRole,
}  # fmt: skip


class Role(Enum):
    """What a group of workers does; the value says which of our roles."""

    Actor = (ACTOR,)
    Rollout = (ROLLOUT,)
    ActorRollout = (ACTOR, ROLLOUT)
    Critic = (enums.Role.CRITIC,)
    RefPolicy = (enums.Role.REF,)
    RewardModel = (enums.Role.REWARD,)
    ActorRolloutRef = (ACTOR, ROLLOUT, enums.Role.REF)


class RayWorkerGroup:
    """A name for `ray_worker_group_cls`; the configuration chooses engines and runtime."""


class NVMegatronRayWorkerGroup(RayWorkerGroup):
    """The same for Megatron, which the actor must then have as `backend`."""


@dataclass(frozen=True)
class ResourcePoolManager:
    """Pools by name, each with the processes of its nodes, and each role's pool."""

    resource_pool_spec: Mapping[str, Sequence[int]]
    mapping: Mapping[Role, str]


@dataclass(frozen=True)
class RewardManager:
    """A reward by functions or rules.

    Attributes:
        tokenizer: The policy's.
        num_examine: Samples of each data source that a call prints.
        compute_score: A function with verl's or our arguments; None = the data source's rule.
    """

    tokenizer: Any
    num_examine: int
    compute_score: Callable[..., Any] | None = None

    def __call__(self, samples: Sequence[Sample]) -> list[float]:
        """Print the first samples of each data source, after scoring; return all scores."""
        shown: Counter[str | None] = Counter()
        for sample in samples:
            shown[sample.data_source] += 1
            if shown[sample.data_source] <= self.num_examine:
                for name in ("prompt", "response", "ground_truth", "score"):
                    if (value := getattr(sample, name)) is not None:
                        print(f"[{name}] {value}")
        return [sample.score for sample in samples]

    def as_key(self) -> str | None:
        """Return `compute_score` as `reward.function`; ConfigError if it is in no file."""
        if self.compute_score is None:
            return None
        function = inspect.unwrap(self.compute_score)
        name, code = getattr(function, "__qualname__", "<"), getattr(function, "__code__", None)
        if "<" in name or code is None or not code.co_filename.endswith(".py"):
            rule = "must be a function of a Python file, at its top level"
            raise ConfigError(Problem("compute_score", rule, name, "write it there"))
        return f"{code.co_filename}:{name}"


class RayPPOTrainer:
    """The run that a configuration describes, with roles, pools and rewards of a script."""

    def __init__(
        self,
        config: Any,
        tokenizer: Any,
        role_worker_mapping: Mapping[Role, type],
        resource_pool_manager: ResourcePoolManager,
        ray_worker_group_cls: type = RayWorkerGroup,
        reward_fn: RewardManager | None = None,
        val_reward_fn: RewardManager | None = None,
    ) -> None:
        """Resolve the configuration; starts nothing. Raises ConfigError with the problems.

        `config` is a RunConfig, or a mapping (OmegaConf's too) with keys of verl or ours, and
        `tokenizer` one of transformers, from a folder.
        """
        self.reward_fns = reward_fn, val_reward_fn
        given = _read(config)
        if name := getattr(tokenizer, "name_or_path", None):
            given.sections["training"]["tokenizer_name_or_path"] = name
        function, other = (manager and manager.as_key() for manager in self.reward_fns)
        if function:
            given.sections["reward"]["function"] = function
        self.classes = _assign(given, role_worker_mapping, resource_pool_manager)
        self.config, notes = resolve_given(given, "library")
        rules = [
            f"role_worker_mapping must have a worker for {role.value}"
            for role in self.config.roles
            if role not in self.classes
            and not (role is enums.Role.REWARD and self.config.reward.kind is RULE)
        ]
        if other not in (None, function):
            rules.append("val_reward_fn must have the compute_score of reward_fn, or none")
        is_megatron = issubclass(ray_worker_group_cls, NVMegatronRayWorkerGroup)
        if is_megatron and self.config.actor_rollout.backend == "fsdp":
            rules.append("ray_worker_group_cls must be RayWorkerGroup with FSDP")
        if rules:
            raise ConfigError([Problem("", rule) for rule in rules])
        for note in notes:
            print(f"note: {note}", flush=True)

    def init_workers(self) -> None:
        """Check files, make the run directory, start the workers; UserError for mistakes before.

        A run that is finished already, or only validates, ends here. Raises SystemExit as `fit`.
        """
        own = {role: c for role, c in self.classes.items() if c is not CLASSES[role]}
        OWN_ROLES.update(own)
        self._steps = self._run()
        try:
            self.trainer = next(self._steps, None)
        finally:
            for role in own:
                del OWN_ROLES[role]

    def fit(self) -> None:
        """Train, export the final weights and end the workers.

        Raises:
            SystemExit: The run failed or was stopped, with its exit code; stderr has the reason.
        """
        next(self._steps, None)

    def _run(self) -> Iterator[PpoTrainer]:
        warnings.filterwarnings("ignore", category=UserWarning, module="megatron")
        from mindspeed_rlxf.trainer.preflight import prepare
        from mindspeed_rlxf.trainer.run import Ending, run_in_steps

        with opened(make_console(self.config.logging.console)):
            prepared = prepare(self.config)
            ending = Ending(self.config, prepared)
            for trainer in run_in_steps(self.config, prepared, ending):
                trainer.recorder.show_samples = self.reward_fns
                yield trainer
        if ending.exit_code:
            raise SystemExit(ending.exit_code)


def _read(config: Any) -> Given:  # of verl, MindSpeed-LLM or ours
    if isinstance(config, RunConfig):
        return Given(to_tree(config))
    tree: Any = OmegaConf.to_container(config) if isinstance(config, DictConfig) else dict(config)
    if is_verl(tree):
        return translate_verl(tree, count_rows)
    given = Given(tree)
    translate(given)
    return given


def _assign(
    given: Given, workers: Mapping[Role, type], manager: ResourcePoolManager
) -> dict[enums.Role, type]:
    """Return the class of each of our roles, and set our keys for their pools and places.

    Actor and rollout on two pools split one. A reward class of the user scores alone.
    """
    key, found, places = "role_worker_mapping", dict[enums.Role, type](), dict[enums.Role, str]()
    pools = {name: list(sizes) for name, sizes in manager.resource_pool_spec.items()}
    for role, named in workers.items():
        worker = getattr(named, "__ray_actor_class__", named)  # verl's scripts have ray.remote(...)
        if (pool := manager.mapping.get(role)) not in pools:
            rule = f"must name a pool of resource_pool_spec for {role}"
            raise ConfigError(Problem("mapping", rule, pool, f"use {', '.join(pools)}"))
        for part in role.value:
            if part in found:
                rule = f"must have {part.value} once, {role} has it again"
                raise ConfigError(Problem(key, rule, remedy=f"remove {role}"))
            is_actor = issubclass(worker, ActorRole) and part in (ROLLOUT, enums.Role.REF)
            found[part], places[part] = CLASSES[part] if is_actor else worker, str(pool)
            if not issubclass(found[part], CLASSES[part]):
                rule = f"must have a subclass of {CLASSES[part].__name__} for {role}"
                raise ConfigError(Problem(key, rule, worker.__name__, "use one"))
    if missing := [role.value for role in (ACTOR, ROLLOUT) if role not in found]:
        rule = f"must have a worker for {' and '.join(missing)}"
        raise ConfigError(Problem(key, rule, remedy="use Role.ActorRollout"))
    reward, sections = found.get(enums.Role.REWARD, RewardRole), given.sections
    if reward is not RewardRole and sections["reward"].get("kind") == RULE.value:
        sections["reward"]["kind"] = enums.RewardKind.ROLE.value
    if (first := places[ACTOR]) != (second := places.pop(ROLLOUT)):
        trains, generates = sum(pools.pop(first)), sum(pools.pop(second))
        sections[ACTOR.value].update(num_gpus_for_train=trains, num_gpus_for_infer=generates)
        places[ACTOR], pools[f"{first}+{second}"] = f"{first}+{second}", [trains + generates]
    placement = {role.value: pool for role, pool in places.items()}
    sections.update(resource_pool=pools, placement=placement)
    return found
