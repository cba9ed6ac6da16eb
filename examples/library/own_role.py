"""A policy loss and a reward role of one's own, as methods of classes; rewards on their own device.

python examples/tiny/make.py
python examples/library/own_role.py trainer.total_training_steps=10
"""

from pathlib import Path

import torch
from omegaconf import OmegaConf
from transformers import AutoTokenizer

from mindspeed_rlxf.algorithms.losses import TokenLoss
from mindspeed_rlxf.api import (
    ActorRolloutRefWorker,
    CriticWorker,
    RayPPOTrainer,
    ResourcePoolManager,
    RewardManager,
    RewardModelWorker,
    Role,
)
from mindspeed_rlxf.data.batch import RoleOutput, Scores
from mindspeed_rlxf.roles.reports import ScoreReport


class UnclippedActor(ActorRolloutRefWorker):
    """Learns from importance-weighted advantages without a clip."""

    def loss(self, log_probs, old_log_probs, advantages, clip, lengths):
        """Return -A r for each token."""
        ratio = torch.exp(log_probs - old_log_probs)
        return TokenLoss(-advantages * ratio, torch.zeros_like(ratio).bool())


class DigitReward(RewardModelWorker):
    """Scores the share of correct digits."""

    def score(self, rollouts):
        """Score a batch, in the processes of the role's pool."""
        texts = list(
            map(self.texts.response, rollouts.response_tokens(), rollouts.has_eos.tolist())
        )
        pairs = zip(texts, rollouts.ground_truths, strict=True)
        scores = [sum(map(str.__eq__, text, truth)) / len(truth) for text, truth in pairs]
        return RoleOutput(Scores(torch.tensor(scores)), ScoreReport(scores))


def main():
    config = OmegaConf.load(Path(__file__).with_name("ppo.yaml"))
    config = OmegaConf.merge(config, OmegaConf.from_cli())
    tokenizer = AutoTokenizer.from_pretrained(config.actor_rollout_ref.model.path)
    workers = {
        Role.ActorRolloutRef: UnclippedActor,
        Role.Critic: CriticWorker,
        Role.RewardModel: DigitReward,
    }
    pools = {"train": [config.trainer.n_gpus_per_node], "reward": [1]}
    places = dict.fromkeys(workers, "train") | {Role.RewardModel: "reward"}
    examine = RewardManager(tokenizer, num_examine=1)
    manager = ResourcePoolManager(pools, places)
    trainer = RayPPOTrainer(config, tokenizer, workers, manager, reward_fn=examine)
    trainer.init_workers()
    trainer.fit()


if __name__ == "__main__":
    main()
