"""The ranks that score, as the driver calls them."""

from __future__ import annotations

from mindspeed_rlxf.cluster.group import Pending, RoleGroup, Sharded
from mindspeed_rlxf.cluster.protocol import Pool
from mindspeed_rlxf.cluster.refs import RowsRef
from mindspeed_rlxf.config.enums import RewardKind, Role
from mindspeed_rlxf.config.schema import RunConfig
from mindspeed_rlxf.roles.reports import FailedSample, ScoreReport
from mindspeed_rlxf.roles.reward import RewardRole
from mindspeed_rlxf.roles.scorer import ScorerRole

FAILED_SHARE = 0.1  # of a batch, where reward.max_failed is not given
NUM_NAMED = 8


class RewardsFailed(RuntimeError):
    """More samples of a batch could not be scored than `reward.max_failed` allows."""


class RewardGroup:
    """The ranks that score responses.

    group:    ranks of the reward model, or of the rules; without a model the scorers, if any
    scorers:  ranks that score by functions or rules in processes, during generation; None = no such
    streams:  the scores of training come from the scorers, alone or together with the model
    """

    def __init__(self, config: RunConfig, pool: Pool, beside: RoleGroup | None = None) -> None:
        """Choose the ranks. beside: the ranks that generate, which get the scorers, if any"""
        self.run, self.scorers = config, None
        by_model = config.reward.kind is not RewardKind.RULE
        if beside is not None:
            self.scorers = RoleGroup(Role.SCORER, beside.layout, beside.pool)
        by_rules = not by_model or bool(config.reward.parts) or config.reward.chooses_by_label
        self.streams = beside is not None and by_rules
        self.group = (
            self.scorers
            if self.scorers and not by_model
            else RoleGroup(Role.REWARD, config.layout(Role.REWARD), pool)
        )

    def build(self) -> list[Pending]:
        """Submit the building of the reward's own ranks, if there are any."""
        if self.group is self.scorers:
            return []
        return [self.group.build(RewardRole, self.run)]

    def score(self, rollouts: RowsRef) -> Pending:
        """Submit the scoring of the responses. Rows: Scores. Reports: ScoreReport per replica.

        With functions beside a model, the scorers score first and the model adds its scores.
        """
        if not self.streams:
            return self.group.call(RewardRole.score, rollouts)
        scored = self._score_by_functions(rollouts)
        if self.group is self.scorers:
            return scored
        both = self.group.call(RewardRole.score_beside_rules, rollouts, scored.rows())
        return both.after(scored).require(self._check)

    def score_by_rule(self, rollouts: RowsRef) -> Pending:
        """Submit scoring by the rules or functions alone, even if the reward is a model.

        Reports have the answers found in the responses.
        """
        if self.scorers is not None:
            return self._score_by_functions(rollouts, True)
        return self.group.call(RewardRole.score_by_rule, rollouts, True)

    def _score_by_functions(self, rollouts: RowsRef, find_answers: bool = False) -> Pending:
        """Submit scoring by the scorers."""
        assert self.scorers is not None
        is_whole = rollouts.selection is None and len(rollouts.pieces) == self.scorers.layout.dp
        pieces = Sharded([RowsRef((piece,)) for piece in rollouts.pieces]) if is_whole else rollouts
        scored = self.scorers.call(ScorerRole.score, pieces, find_answers)
        return scored.require(self._check)

    def _check(self, reports: list[ScoreReport]) -> None:
        failures = [failure for report in reports for failure in report.failures]
        check_failures(failures, self.run.reward.max_failed)


def check_failures(failures: list[FailedSample | None], max_failed: int | None) -> None:
    """Raise RewardsFailed, with the first failed samples, if more than `max_failed` failed.

    failures:   one entry per sample; None = it was scored
    max_failed: None = a tenth of the samples (FAILED_SHARE), rounded down, at least one
    """
    failed = [failure for failure in failures if failure is not None]
    allowed = max(1, int(FAILED_SHARE * len(failures))) if max_failed is None else max_failed
    if len(failed) <= allowed:
        return
    named = [f"sample {f.sample_id}: {f.cause} ({f.message})" for f in failed[:NUM_NAMED]]
    more = [f"and {len(failed) - NUM_NAMED} more"] if len(failed) > NUM_NAMED else []
    raise RewardsFailed(
        f"{len(failed)} of {len(failures)} samples of a batch could not be scored, at most "
        f"reward.max_failed={allowed} may; correct the reward, or raise it. "
        + "; ".join([*named, *more])
    )
