"""The real loop over roles in virtual time, with checkpoints in memory and kills."""

from __future__ import annotations

import copy
import random
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

from mindspeed_rlxf.config.enums import AdvEstimator, OldLogProbs, Role
from mindspeed_rlxf.config.schema import AlgorithmConfig
from mindspeed_rlxf.data.sampler import PromptSampler
from mindspeed_rlxf.roles.reports import ExperienceReport, Summary, UpdateReport
from mindspeed_rlxf.roles.rollout import Sampling
from mindspeed_rlxf.trainer import ppo
from mindspeed_rlxf.trainer.prompt_source import PromptSource
from mindspeed_rlxf.trainer.stopping import StopRequest
from tests.virtual_roles import (
    Call,
    Clock,
    Killed,
    Lane,
    VirtualReward,
    VirtualRollout,
    make_prompts,
    through_json,
    values_of,
)

ZERO = Summary(1, 0.0, 0.0, 0.0)


@dataclass(frozen=True)
class Setting:
    """A run: schedule, batch and group sizes, filter, and the sizes of the generating pool."""

    staleness: int = 3
    lead: int = 1
    prompts: int = 2
    group_size: int = 2
    iterations: int = 6
    warmup: int = 0
    filters: bool = False
    remax: bool = False
    most_batches: int | None = None
    slice_steps: int = 8
    replicas: int = 2
    rows: int = 3
    longest: int = 60
    update_s: float = 1.0
    failures: tuple[int, ...] = ()  # slices in which a server fails
    seed: int = 0

    @classmethod
    def draw(cls, seed: int) -> Setting:
        """Return a random one."""
        rng = random.Random(seed)
        staleness = rng.randrange(5)
        filters = rng.random() < 0.5
        return cls(
            staleness,
            rng.randrange(2) if staleness else 0,
            prompts=rng.randrange(1, 5),
            group_size=rng.randrange(2, 4),
            iterations=rng.randrange(2, 8),
            warmup=rng.choice([0, 0, 2]),
            filters=filters,
            remax=rng.random() < 0.3 and not filters,
            most_batches=rng.choice([None, 1, 2, 3]) if filters else None,
            slice_steps=rng.choice([1, 3, 8, 40]),
            replicas=rng.randrange(1, 4),
            rows=rng.randrange(1, 9),
            longest=rng.choice([10, 60]),
            update_s=rng.choice([0.0, 0.3, 3.0]),
            seed=seed,
        )

    @property
    def num_prompts(self) -> int:
        """More prompts than are drawn."""
        return self.prompts * (self.iterations + self.staleness + 2) * (self.most_batches or 6)

    def length_of(self, sample_id: int, sampling: Sampling) -> int:
        is_greedy = sampling is Sampling.GREEDY
        return random.Random(hash((self.seed, sample_id, is_greedy))).randrange(1, self.longest)

    def score_of(self, sample_id: int, sampling: Sampling) -> float:
        """0 or 1; all samples of every third group are alike."""
        group, number = divmod(sample_id, self.group_size)
        is_alike = random.Random(hash((self.seed, group))).random() < 0.4
        return float(not is_alike and number == 0)


@dataclass
class Saved:
    """A checkpoint."""

    iteration: int
    state: dict[str, Any]
    ahead: dict[Any, Any]
    num_updates: int
    consumed: list[Any]
    trained: list[Any]


@dataclass
class VirtualRun:
    """One start of a run: the driver with all its roles, from the last checkpoint on.

    Attributes:
        trained: For each iteration its samples, each with the versions of its tokens.
        consumed: Prompts passed by each iteration.
        saves: The checkpoints, the newest last.
    """

    setting: Setting
    resumed: Saved | None = None
    clock: Clock = field(default_factory=Clock)
    save_interval: int = 1
    trained: list[Any] = field(default_factory=list)
    consumed: list[Any] = field(default_factory=list)
    saves: list[Saved] = field(default_factory=list)

    def __post_init__(self) -> None:
        setting = self.setting
        # One process has one lane; without a lead training and generation never overlap either.
        self.training = Lane(self.clock)
        self.generating = Lane(self.clock)
        self.updates: list[Call] = []
        self.num_updates = 0  # of the weights that the actor has
        self.rollout = VirtualRollout(
            self.generating,
            setting.length_of,
            setting.replicas,
            setting.rows,
            setting.group_size,
        )
        self.rollout.check_weights = self.check_weights
        self.rollout.failures = {*setting.failures}
        self.reward = VirtualReward(self.generating, setting.score_of)
        self.source = PromptSource(
            make_prompts(setting.num_prompts),
            PromptSampler(setting.num_prompts, setting.prompts, 1, False),
            setting.group_size,
        )
        if self.resumed is not None:
            self.trained = list(self.resumed.trained)
            self.consumed = list(self.resumed.consumed)
            self.num_updates = self.resumed.num_updates
            self.saves = [self.resumed]
        self.trainer = self.make_trainer()

    def make_trainer(self) -> ppo.PpoTrainer:
        roles: Any = SimpleNamespace(
            actor=self, critic=None, ref=None, rollout=self.rollout, reward=self.reward
        )
        checkpoints: Any = SimpleNamespace(
            directory=SimpleNamespace(path=""),
            is_due=lambda iteration, _stops: iteration % self.save_interval == 0,
            settle=lambda _note: None,
            write=self.write,
            commit=self.commit,
            newest=0,
            write_s=0.0,
        )
        return ppo.PpoTrainer(
            self.make_config(),
            roles,
            self.source,
            SimpleNamespace(validate=lambda *_: {}),  # type: ignore[arg-type]
            Records(self),  # type: ignore[arg-type]
            checkpoints,
            StopRequest(0.0),
        )

    def make_config(self) -> Any:
        setting = self.setting
        estimator = AdvEstimator.REMAX if setting.remax else AdvEstimator.GRPO
        return SimpleNamespace(
            algorithm=AlgorithmConfig(
                adv_estimator=estimator,
                filter_groups=setting.filters,
                max_num_gen_batches=setting.most_batches,
            ),
            actor_rollout=SimpleNamespace(
                n_samples_per_prompt=setting.group_size, max_new_tokens=64, bf16=False
            ),
            training=SimpleNamespace(
                train_iters=setting.iterations, seed=1, global_batch_size=setting.prompts
            ),
            rollout=SimpleNamespace(
                max_staleness=setting.staleness,
                slice_steps=setting.slice_steps,
                runs_slices=setting.staleness > 0,
                runs_agents=False,
            ),
            runs_vllm=bool(setting.failures),
            lead=setting.lead,
            train_rollout_split=(1, 1) if setting.lead else (),
            placement={Role.ACTOR_ROLLOUT: "main"},
            resource_pool={"main": [1]},
            runtime=SimpleNamespace(kind="ray"),
            validation=SimpleNamespace(before=False, after=False, interval=0, best_metric=""),
            warmup_iters=setting.warmup,
            samples_per_iteration=setting.prompts * setting.group_size,
            old_log_probs=OldLogProbs.RECOMPUTE,
            count_updates=lambda iteration: max(0, iteration - setting.warmup),
        )

    def fit(self) -> None:
        """Resume if there is a checkpoint, and train; raises Killed at `clock.kill_at`."""
        quiet = {
            name: (lambda *_: {})
            for name in ("phase_metrics", "idle_metrics", "generation_flops", "done_work")
        }
        quiet["generation_flops"] = lambda *_: 0.0
        quiet["done_work"] = lambda *_: SimpleNamespace(flops=0.0, tokens=0)
        with patch.multiple(ppo, **quiet), patch.object(ppo.lock, "require"):
            if self.resumed is not None:
                self.rollout.saved = copy.deepcopy(self.resumed.ahead)
                self.trainer.load_state_dict(through_json(self.resumed.state))
            self.trainer.fit()

    # The actor's calls.

    def log_probs(self, rollouts: Any, _lengths: Any) -> Call:
        rows = values_of(rollouts)
        report = SimpleNamespace(gap=ZERO, weight=None)
        return self.training.submit(0.0, report, rows, [rollouts])

    def make_experience(self, inputs: Any) -> Call:
        rollouts, scores = values_of(inputs.rollouts), values_of(inputs.scores)
        assert scores == [self.setting.score_of(r.sample_id, r.sampling) for r in rollouts]
        if self.setting.remax:
            greedy = [response.sample_id for response in values_of(inputs.greedy)]
            size = self.setting.group_size
            assert greedy == [r.sample_id // size * size for r in rollouts]
        report = ExperienceReport([], ZERO, ZERO, ZERO, None, None)
        return self.training.submit(0.0, report, rollouts, [inputs.rollouts, inputs.scores])

    def update_policy(self, rollouts: Any, experience: Any, *_arguments: Any) -> Call:
        self.num_updates += 1
        report = UpdateReport([{"grad_norm": 1.0}], 1.0)
        inputs = [rollouts, experience]
        call = self.training.submit(self.setting.update_s, report, inputs=inputs)
        self.updates.append(call)
        return call

    def check_weights(self, version: int) -> None:
        """Weights are labelled with the updates that they have, and none is under way."""
        assert version == self.num_updates, "the label of the weights is that of others"
        for call in self.updates:
            assert call.started + call.seconds <= self.clock.now, "an update changes the weights"

    # Checkpoints.

    def write(self, iteration: int, _note: Any) -> float:
        self._ahead = self.rollout.ahead()
        return 0.0

    def commit(self, iteration: int, state: dict[str, Any], _score: Any, _note: Any) -> None:
        self.clock.wait_until(self.clock.now + 0.01)
        saved = Saved(
            iteration,
            through_json(state),
            self._ahead,
            self.num_updates,
            list(self.consumed),
            list(self.trained),
        )
        self.saves.append(saved)


class Records:
    """The recorder: notes what an iteration has trained and passed."""

    def __init__(self, run: VirtualRun) -> None:
        self.run = run
        self.note = print

    def token_log(self, *_arguments: Any) -> None:
        return None

    def check_health(self, *_arguments: Any) -> None:
        return None

    def write_samples(self, iteration: int, _actor: Any, rollouts: Any, *_more: Any) -> None:
        samples = [(r.sample_id, tuple(r.versions)) for r in values_of(rollouts)]
        self.run.trained.append((iteration, samples))

    def warn_of_non_finite(self, *_arguments: Any) -> None: ...

    def write_consumed(self, iteration: int, consumed: Any) -> None:
        self.run.consumed.append((iteration, consumed.first_sample_id, tuple(consumed.prompts)))

    def write_iteration(self, *_arguments: Any) -> None: ...

    def write_timeline(self, *_arguments: Any) -> None: ...


def check_whole(run: VirtualRun) -> None:
    """Check a finished run: every sample once and in order, and none too old."""
    setting = run.setting
    assert [iteration for iteration, _ in run.trained] == [*range(1, setting.iterations + 1)]
    prompts = [prompt for _, _, passed in run.consumed for prompt in passed]
    assert prompts == list(range(len(prompts))), "a prompt is missing, doubled or out of order"
    ids = [sample_id for _, samples in run.trained for sample_id, _ in samples]
    assert ids == sorted(set(ids)), "a sample is doubled or out of order"
    if not setting.filters:
        assert ids == list(range(len(prompts) * setting.group_size))
    for iteration, samples in run.trained:
        oldest = max(0, iteration - 1 - setting.staleness - setting.warmup)
        for sample_id, versions in samples:
            assert min(version for version, _ in versions) >= oldest, f"sample {sample_id}"
            drawn = sum(count for _, count in versions)
            assert drawn == setting.length_of(sample_id, Sampling.TRAINING)


def run_whole(setting: Setting) -> VirtualRun:
    """Run without a kill."""
    run = VirtualRun(setting)
    run.fit()
    check_whole(run)
    return run


def run_with_kills(setting: Setting, rng: random.Random, kills: int, keeps_ahead: bool) -> int:
    """Run with random kills and saves, and compare with the run without; return the kills done.

    keeps_ahead: whether checkpoints have what was generated ahead. Without it samples are other
    ones, each still once.
    """
    whole = run_whole(setting)
    interval = rng.randrange(1, 4)
    saved: Saved | None = None
    num_killed = 0
    for left in range(kills, -1, -1):
        kill_at = rng.uniform(0.0, whole.clock.now) if left else float("inf")
        run = VirtualRun(setting, saved, Clock(kill_at), interval)
        if saved is not None and not keeps_ahead:
            saved.ahead.clear()
            saved.state.pop("stream", None)
        try:
            run.fit()
            break
        except Killed:
            num_killed += 1
        saved = run.saves[-1] if run.saves else None
    check_whole(run)
    if keeps_ahead:
        assert run.trained == whole.trained, "other tokens than without a kill"
        assert run.consumed == whole.consumed
    return num_killed
