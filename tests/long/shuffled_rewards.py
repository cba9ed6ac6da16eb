"""Run `ray_gpt.py` in one process with the training scores of a batch shuffled among its samples.

Validation scores stay correct. `test_demo_learns` expects that nothing is trained such rewards.
"""

import sys

import torch

from mindspeed_rlxf.cli.train import main
from mindspeed_rlxf.data.batch import RoleOutput, Rollouts, Scores
from mindspeed_rlxf.roles import reward

original = reward.RewardRole.score


def score(self: reward.RewardRole, rollouts: Rollouts) -> RoleOutput:
    """Score as RewardRole does, then permute the scores, seeded by the first sample id."""
    output = original(self, rollouts)
    generator = torch.Generator().manual_seed(rollouts.sample_ids[0])
    order = torch.randperm(rollouts.num_rows, generator=generator)
    return RoleOutput(Scores(output.rows.scores[order]), output.report)


if __name__ == "__main__":
    reward.RewardRole.score = score
    sys.exit(main(sys.argv[1:]))
