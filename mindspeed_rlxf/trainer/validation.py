"""Generate responses to the validation prompts, score them by rule or model, and log them."""

import contextlib
import math
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from mindspeed_rlxf.checkpoint.checkpoints import RunCheckpoints
from mindspeed_rlxf.checkpoint.directory import RunDirectory
from mindspeed_rlxf.cluster.interface import Runtime
from mindspeed_rlxf.config.enums import RewardKind, Role
from mindspeed_rlxf.config.schema import RunConfig, ValidationConfig
from mindspeed_rlxf.data.prompts import Prompt
from mindspeed_rlxf.reporting.phases import phase
from mindspeed_rlxf.reporting.run_log import say
from mindspeed_rlxf.reporting.table import pairs
from mindspeed_rlxf.roles.all_roles import RoleGroups
from mindspeed_rlxf.roles.reward import check_failures
from mindspeed_rlxf.roles.rollout import Sampling
from mindspeed_rlxf.trainer.preflight import Prepared
from mindspeed_rlxf.trainer.prompt_source import as_rows
from mindspeed_rlxf.trainer.recorder import Recorder


@dataclass(frozen=True)
class Scored:
    """A scored response.

    Attributes:
        score: Score.
        length: In tokens.
        parts: Named parts of the score.
        answer: Extracted answer, if any.
        is_scored: False if it could not be scored, for a cause outside the response.
    """

    score: float
    length: int
    parts: Mapping[str, float | str] = field(default_factory=dict)
    answer: str | None = None
    is_scored: bool = True

    def is_right(self, pass_score: float | None) -> bool:
        """Return whether the response is right: score >= pass_score; NaN never is.

        With `pass_score` None: whether the accuracy part (of the first function that returns one),
        or without one the score, is above 0.
        """
        if pass_score is not None:
            return self.score >= pass_score
        accuracies = self._accuracies()
        return (accuracies[0] if accuracies else self.score) > 0

    @property
    def has_partial_credit(self) -> bool:
        """Whether the score is between 0 and 1, and no accuracy part says whether it is right."""
        return self.is_scored and 0 < self.score < 1 and not self._accuracies()

    def _accuracies(self) -> list[float]:
        names = ("accuracy", "acc", "base_acc")
        return [
            value
            for name, value in self.parts.items()
            if name.rpartition("/")[2] in names and not isinstance(value, str)
        ]


def pass_at_k(num_samples: int, num_right: int, k: int) -> float:
    """Return 1 - C(n - c, k) / C(n, k): the chance that k of n responses include a right one.

    n = num_samples, c = num_right, k: 1 to n. Unbiased estimator from arXiv:2107.03374, equation 1.
    """
    return 1.0 - math.comb(num_samples - num_right, k) / math.comb(num_samples, k)


def best_at_k(scores: Sequence[float], k: int) -> float:
    """Return the expected maximum of k of the n scores, drawn without replacement; k: 1 to n.

    The score ranked i (from 0, ascending) is the largest in C(i, k - 1) of the C(n, k) choices. NaN
    if any score is NaN.
    """
    if any(math.isnan(score) for score in scores):
        return math.nan
    expected = 0.0
    for rank, score in enumerate(sorted(scores)):
        weight = math.comb(rank, k - 1) / math.comb(len(scores), k)
        if weight:  # else inf * 0 would be NaN
            expected += weight * score
    return expected


def majority_score(answers: Sequence[str | None], scores: Sequence[float]) -> float:
    """Return the mean score of the responses with the most frequent answer.

    Self-consistency vote (arXiv:2203.11171, section 2). Responses without an answer do not vote; if
    there is no answer at all, return the mean of all scores. On a tie, return the mean over the
    tied answers' mean scores.
    """
    votes = Counter(answer for answer in answers if answer is not None)
    if not votes:
        return sum(scores) / len(scores)
    max_votes = max(votes.values())
    winners = [answer for answer, num_votes in votes.items() if num_votes == max_votes]
    scores_of_answer: dict[str | None, list[float]] = defaultdict(list)
    for answer, score in zip(answers, scores, strict=True):
        scores_of_answer[answer].append(score)
    means = [sum(scores_of_answer[winner]) / max_votes for winner in winners]
    return sum(means) / len(winners)


def measure(
    groups: Sequence[Sequence[Scored]], data_sources: Sequence[str], config: ValidationConfig
) -> dict[str, float]:
    """Return metrics `val/<data source>/<name>`.

    `score`, `response_length` and the parts are means over the responses having them. The other
    names (mean@N, best@K, pass@K, maj@N), if in `ValidationConfig.metrics`, are means over prompts.
    Unscored responses are left out, and so are prompts with fewer than K others.

    Args:
        groups: The responses to each prompt.
        data_sources: Each prompt's data source.
        config: Validation settings.
    """
    values: dict[str, list[float]] = defaultdict(list)
    for group, source in zip(groups, data_sources, strict=True):
        scored = [response for response in group if response.is_scored]
        for response in scored:
            named_values: dict[str, float | str] = {
                "score": response.score,
                "response_length": float(response.length),
                **response.parts,
            }
            for name, value in named_values.items():
                if not isinstance(value, str):
                    values[f"val/{source}/{name}"].append(value)
        for name, metric in _measure_prompt(scored, len(group), config).items():
            values[f"val/{source}/{name}"].append(metric)
    return {name: sum(to_average) / len(to_average) for name, to_average in values.items()}


def _measure_prompt(group: Sequence[Scored], n: int, config: ValidationConfig) -> dict[str, float]:
    """Return one prompt's mean@N, best@K, pass@K and maj@N, those in `config.metrics`.

    `group` has its scored responses: N unless some could not be scored; {} for none.
    """
    if not group:
        return {}
    scores = [response.score for response in group]
    answers = [response.answer for response in group]
    num_right = sum(response.is_right(config.pass_score) for response in group)
    metrics = {f"mean@{n}": sum(scores) / len(group)}
    sizes = [k for k in config.sizes if k <= len(group)]
    for k in sizes:
        metrics[f"best@{k}"] = best_at_k(scores, k)
    for k in sizes:
        metrics[f"pass@{k}"] = pass_at_k(len(group), num_right, k)
    metrics[f"maj@{n}"] = majority_score(answers, scores)
    return {name: value for name, value in metrics.items() if name in config.metrics}


class Validator:
    """Generates and scores responses to all validation prompts.

    Sample ids are the same in each validation: response i to prompt p, both counted from 0, is
    sample p * n_samples + i. With the seed they determine the sampled tokens, so two validations
    differ only by their weights.
    """

    def __init__(
        self, config: RunConfig, roles: RoleGroups, prompts: Sequence[Prompt], recorder: Recorder
    ) -> None:
        self.config = config.validation
        self.reward = config.reward
        self.roles = roles
        self.recorder = recorder
        # Not that of training, because sample ids of validation are also those of training.
        self.seed = int(np.random.SeedSequence([config.training.seed, 1]).generate_state(1)[0])
        size = self.config.n_samples
        self.prompts = as_rows([prompt for prompt in prompts for _ in range(size)])
        # The first ones are repeated until the replicas of rollout and reward divide their number.
        row_multiple = math.lcm(roles.rollout.group.layout.dp, roles.reward.group.layout.dp)
        count = self.prompts.num_rows
        rows = [i % count for i in range(count + -count % row_multiple)] if count else []
        self._padded = self.prompts.select(rows)

    def validate(self, iteration: int, version: int, own_line: bool = False) -> dict[str, float]:
        """Generate and score responses to the validation prompts; return and print the metrics.

        Names are `val/<data source>/<metric>` (`measure`) and `timing/val`, seconds for generation
        and scoring; {} without validation prompts. The rollout ranks get the actor's weights first.
        Samples are written to the run directory.

        Args:
            iteration: Iterations done.
            version: Updates in the actor's weights.
            own_line: Also write the metrics to metrics.jsonl, as a separate line, and to trackers;
                False = the caller writes them.

        Raises:
            RewardsFailed: Too many samples failed, by the functions that score or by their agents.
        """
        if not self.prompts.num_rows:
            return {}
        with phase(f"validating, {self.prompts.num_rows} responses", prints=False):
            self.roles.rollout.update_weights(self.roles.actor, version)
            generated = self.roles.rollout.generate(self._padded, self.seed, Sampling.VALIDATION)
            rollouts = generated.rows()
            if self.config.reward is RewardKind.RULE:
                scored = self.roles.reward.score_by_rule(rollouts)
            else:
                scored = self.roles.reward.score(rollouts)
            generation = generated.result()
            failures = [failure for report in generation for failure in report.agent_failures]
            check_failures(failures, self.reward.max_failed)
            lengths = [n for report in generation for n in report.response_lengths]
            reports = scored.result()
        responses: list[Scored] = []
        for report in reports:
            is_scored = report.is_scored
            for i, score in enumerate(report.scores):
                parts = report.parts[i] if report.parts else {}
                answer = report.answers[i] if report.answers else None
                length = lengths[len(responses)]
                responses.append(Scored(score, length, parts, answer, is_scored[i]))
        for row, failure in enumerate(failures):
            if failure is not None:  # left out, the others' mean would be the higher for it
                responses[row] = Scored(self.reward.failed_score, lengths[row])
        del responses[self.prompts.num_rows :]
        has_partial = any(response.has_partial_credit for response in responses)
        if has_partial and self.config.pass_score is None and "pass@1" in self.config.metrics:
            self.recorder.console.warn_once(
                "pass_score",
                "pass@K counts every score above 0 as right, as the reward returns no part "
                "`accuracy`; return one, or set validation.pass_score",
            )
        size = self.config.n_samples
        groups = [responses[i : i + size] for i in range(0, len(responses), size)]
        metrics = measure(groups, self.prompts.data_sources[::size], self.config)
        metrics["timing/val"] = generated.seconds + scored.seconds
        if any(record is not None for report in generation for record in report.records):
            num_failed = sum(failure is not None for failure in failures[: len(responses)])
            metrics["val/agent_failures"] = float(num_failed)
        self.recorder.write_validation(iteration, metrics, own_line)
        about = []
        for row, response in enumerate(responses):
            fields = {
                "data_source": self.prompts.data_sources[row],
                "ground_truth": self.prompts.ground_truths[row],
                "extra_info": self.prompts.extra_infos[row],
                "prompt_id": row // size,
                "answer": response.answer,
            }
            about.append(fields)
        self.recorder.write_samples(
            iteration, self.roles.actor, rollouts, reports, about, validates=True
        )
        return metrics


def build_roles(
    config: RunConfig, prepared: Prepared, runtime: Runtime, directory: RunDirectory
) -> RoleGroups:
    """Start the worker processes, and build the roles in them; servers log to `directory`."""
    split = config.train_rollout_split
    subpool_sizes = {config.placement[Role.ACTOR_ROLLOUT]: split} if split else {}
    count = sum(sum(processes) for processes in config.resource_pool.values())
    with phase(f"starting {count} worker process{'es' if count > 1 else ''}"):
        pools = runtime.create_pools(config.resource_pool, subpool_sizes)
    ends, processes = prepared.eos_token_ids, prepared.scores_in_processes
    return RoleGroups.build(config, pools, ends, processes, str(directory.logs))


def without_unused_roles(config: RunConfig) -> RunConfig:
    """Return the configuration of a validation alone: without critic, reference and their pools."""
    unused = (Role.CRITIC, Role.REF)
    placement = {role: pool for role, pool in config.placement.items() if role not in unused}
    pools = {n: size for n, size in config.resource_pool.items() if n in placement.values()}
    changes = {"critic": None, "placement": placement, "resource_pool": pools}
    return config.model_copy(update=changes)


def validate_only(
    config: RunConfig,
    prepared: Prepared,
    directory: RunDirectory,
    runtime: Runtime,
    writes: bool = True,
) -> int:
    """Start the workers, validate the newest undamaged checkpoint, and return its iteration.

    With `validation.checkpoint` it is the checkpoint of that iteration. Without a checkpoint, or
    with training.new_run, validates the weights in `load`, and returns 0. Metrics and samples go to
    `directory` if this process `writes`; the run's own folder is only read, so it may be in use.
    Raises UserError if all checkpoints are damaged. Critic and reference are not built.
    """
    updates = config.count_updates
    config = without_unused_roles(config)
    roles = build_roles(config, prepared, runtime, directory)
    recorder = Recorder(config, directory, prepared.tokenizer, writes)
    roles.rollout.write_receipt = recorder.write_receipt
    with contextlib.closing(recorder):
        iteration = 0
        if not config.training.new_run:
            run = RunDirectory.of_run(config)
            checkpoints = RunCheckpoints(config, roles, run, "", writes=False)
            iteration = checkpoints.load_newest(recorder.note, config.validation.checkpoint)
        if not iteration:
            recorder.note(f"weights of {config.actor_rollout.load}")
        validator = Validator(config, roles, prepared.val_prompts, recorder)
        version = updates(iteration)
        measured = validator.validate(iteration, version, own_line=True)
    if writes:
        rows = [(name, f"{value:.6g}") for name, value in sorted(measured.items())]
        say(f"validation of iteration {iteration}\n{pairs(rows)}")
    return iteration
