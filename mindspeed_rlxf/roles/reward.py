"""Scores responses: by a reward model, by rules, or by both (training and validation)."""

from __future__ import annotations

import torch
from torch import Tensor

from mindspeed_rlxf.config.enums import RewardKind
from mindspeed_rlxf.config.schema import RunConfig
from mindspeed_rlxf.data.batch import RoleOutput, Rollouts, Scores
from mindspeed_rlxf.data.tokenizer import load_tokenizer
from mindspeed_rlxf.engine.engine import MegatronEngine
from mindspeed_rlxf.engine.micro_batch import MicroBatch
from mindspeed_rlxf.models.parameters import Head
from mindspeed_rlxf.models.transformer import TransformerModel
from mindspeed_rlxf.rewards.manager import RewardManager
from mindspeed_rlxf.roles.reports import ScoreReport


class RewardRole:
    """A rule needs no device; a reward model has an engine of its own."""

    def __init__(self, config: RunConfig) -> None:
        reward = config.reward
        self.config = reward
        self.tokenizer = load_tokenizer(config.training.tokenizer_name_or_path)
        self.rules = RewardManager(dict(reward.rules), config.verifiers)
        self.engine = None
        if reward.kind is RewardKind.MODEL:
            training = config.training
            self.engine = MegatronEngine(
                reward, Head.SCORE, training.seed, deterministic=training.deterministic
            )

    def score(self, rollouts: Rollouts) -> RoleOutput:
        """Scores by what the configuration names as the reward."""
        if self.engine is None:
            return self.score_by_rule(rollouts)
        return self._score_by_model(self.engine, rollouts)

    def score_by_rule(self, rollouts: Rollouts) -> RoleOutput:
        """Scores by the rule of each sample's data source."""
        responses = [
            rollouts.response_ids[row, : rollouts.response_lengths[row]].tolist()
            for row in range(rollouts.num_rows)
        ]
        texts = self.tokenizer.batch_decode(responses, skip_special_tokens=True)
        results = self.rules.score(texts, rollouts.ground_truths, rollouts.data_sources)
        scores = [result.score for result in results]
        report = ScoreReport(scores, [dict(result.parts) for result in results])
        return RoleOutput(Scores(torch.tensor(scores, dtype=torch.float32)), report)

    def _score_by_model(self, engine: MegatronEngine, rollouts: Rollouts) -> RoleOutput:
        """The score head at the last token of each response."""

        def read(model: TransformerModel, batch: MicroBatch, hidden: Tensor) -> Tensor:
            full = model.full_hidden(hidden, partial_gradient=False)
            return model.score(full.index_select(0, batch.last_places()))

        batches = engine.micro_batches(rollouts, range(rollouts.num_rows))
        flat = engine.forward(batches, read)
        if not engine.groups.is_leader:
            return RoleOutput()
        scores = torch.cat(flat).float().cpu()
        return RoleOutput(Scores(scores), ScoreReport(scores.tolist()))
