"""Examples of more plugins: a loss, an objective, a training engine, a data source, a role."""

import json
import time
from pathlib import Path

import torch

from mindspeed_rlxf.algorithms import kl, losses
from mindspeed_rlxf.config.enums import Role
from mindspeed_rlxf.data.batch import RoleOutput, Scores
from mindspeed_rlxf.data.files import register_reader
from mindspeed_rlxf.roles import engines, objectives, own_roles
from mindspeed_rlxf.roles.reports import ScoreReport
from mindspeed_rlxf.roles.reward import RewardRole


@losses.register_policy_loss("soft_clip")
def soft_clip(log_probs, old_log_probs, advantages, clip, lengths):
    """Weigh each token's ratio less the farther it is from 1, without an edge as clipping has."""
    ratio = torch.exp(kl.bounded_log_ratio(log_probs - old_log_probs))
    near = torch.exp(-((ratio.detach() - 1.0) / clip.high).square())
    return losses.TokenLoss(-advantages * ratio * near, near < 0.5)


@objectives.register_objective("best_of_group")
class BestOfGroup(objectives.ClippedObjective):
    """Learns from the responses that are better than the others to their prompt, and only those."""

    def estimate(self, given):
        """Return the positive advantages of the usual estimator."""
        found = super().estimate(given)
        return found._replace(advantages=found.advantages.clamp(min=0.0))


@engines.register_train_engine("timed")
def timed(config, role):
    """Make Megatron's engine, which also reports the seconds of each optimizer step."""
    engine = engines.megatron_engine(config, role)
    step = engine.train_step

    def train_step(*given):
        started = time.perf_counter()
        return {**step(*given), "step_s": time.perf_counter() - started}

    engine.train_step = train_step  # type: ignore[method-assign]
    return engine


@register_reader(".sums")
def read_sums(file):
    """Make the rows that the file describes, {"first": 10, "last": 20}: no row is stored."""
    asked = json.loads(Path(file).read_text())
    for row, left in enumerate(range(asked["first"], asked["last"] + 1), start=1):
        text = f"{left}+{left}="
        yield row, {"prompt": text, "ground_truth": str(2 * left), "data_source": "arithmetic"}


@own_roles.register_role(Role.REWARD)
class Digits(RewardRole):
    """Scores the share of correct digits, on the devices of the role."""

    def score(self, rollouts):
        """Score responses; with `reward.kind: role` these scores are the reward."""
        texts = self._decode(rollouts.response_tokens())
        pairs = zip(texts, rollouts.ground_truths, strict=True)
        scores = [sum(map(str.__eq__, text, truth)) / len(truth) for text, truth in pairs]
        return RoleOutput(Scores(torch.tensor(scores)), ScoreReport(scores))
