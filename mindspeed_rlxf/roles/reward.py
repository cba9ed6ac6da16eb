"""The role that scores responses by a reward model, by rules, or by both."""

from __future__ import annotations

import torch

from mindspeed_rlxf.config.enums import RewardKind, Role
from mindspeed_rlxf.config.schema import RunConfig
from mindspeed_rlxf.data.batch import RoleOutput, Rollouts, Scores
from mindspeed_rlxf.data.tokenizer import load_tokenizer
from mindspeed_rlxf.rewards.manager import RewardManager
from mindspeed_rlxf.rewards.programs import prepare_sandbox
from mindspeed_rlxf.roles.engines import EngineFactory, megatron_engine
from mindspeed_rlxf.roles.reports import ScoreReport


class RewardRole:
    """Scores by rules without a device, or by a reward model with an engine."""

    def __init__(self, config: RunConfig, build_engine: EngineFactory = megatron_engine) -> None:
        reward = config.reward
        self.config = reward
        self.tokenizer = load_tokenizer(config.training.tokenizer_name_or_path)
        self.rules = RewardManager(dict(reward.rules), config.verifiers)
        if line := prepare_sandbox(reward):
            print(line, flush=True)
        by_model = reward.kind is RewardKind.MODEL
        self.engine = build_engine(config, Role.REWARD) if by_model else None

    def score(self, rollouts: Rollouts) -> RoleOutput:
        """Score by the configured reward: a model, or the rules."""
        if self.engine is None:
            return self.score_by_rule(rollouts)
        scores = self.engine.scores(rollouts)
        return RoleOutput(scores, ScoreReport(scores.scores.tolist()) if scores else None)

    def score_by_rule(self, rollouts: Rollouts) -> RoleOutput:
        """Score decoded responses by the verifiers, or by the rule of each sample's data source."""
        responses = [
            rollouts.response_ids[row, : rollouts.response_lengths[row]].tolist()
            for row in range(rollouts.num_rows)
        ]
        texts = self.tokenizer.batch_decode(responses, skip_special_tokens=True)
        results = self.rules.score(texts, rollouts.ground_truths, rollouts.data_sources)
        scores = [result.score for result in results]
        report = ScoreReport(scores, [dict(result.parts) for result in results])
        return RoleOutput(Scores(torch.tensor(scores, dtype=torch.float32)), report)
