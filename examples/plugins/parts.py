"""Examples of three plugins: an advantage estimator, a reward rule and a rollout engine."""

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from mindspeed_rlxf.algorithms import estimators
from mindspeed_rlxf.config.estimator_traits import EstimatorTraits
from mindspeed_rlxf.rewards.rules import RewardResult, register_rule
from mindspeed_rlxf.rollout import rollout_engine, sampling


@estimators.register_estimator("over_median", EstimatorTraits(compares_group=True))
def over_median(inputs: estimators.AdvantageInputs) -> estimators.Advantages:
    """Give each token the response's total reward minus the median of its prompt's responses."""
    groups = inputs.rewards.sum(1).view(-1, inputs.group_size)
    over = (groups - groups.median(1, keepdim=True).values).flatten()
    return estimators.Advantages(over[:, None] * inputs.trained_mask)


@register_rule("last_digit")
def last_digit(response: str, ground_truth: str) -> RewardResult:
    """Score 1 for the correct answer, 0.5 if only the last digit is right, else 0."""
    right, close = response == ground_truth, response[-1:] == ground_truth[-1:]
    return RewardResult(1.0 if right else 0.5 * close, {"last_digit": float(close)})


@rollout_engine.register_rollout_engine("one_by_one")
class OneByOne(rollout_engine.RolloutEngine):
    """Generates with a transformers model on the CPU, one response at a time, without a cache."""

    weights_version = -1

    def __init__(self, config, trained):
        described = AutoConfig.from_pretrained(config.actor_rollout.load)
        self.model, self.counts = AutoModelForCausalLM.from_config(described), None

    def update_weights(self, tensors, version):
        missing, unknown = self.model.load_state_dict(dict(tensors), strict=False)
        assert not unknown and set(missing) <= {"lm_head.weight"}, (missing, unknown)  # tied
        self.weights_version = version

    def stats(self):
        return self.counts

    @torch.no_grad()
    def generate(self, requests):
        self.counts = rollout_engine.GenerationStats()
        for request in requests:
            asked, tokens, logs = request.settings, list[int](), list[float]()
            numbers = request.seed, request.sample_id, asked.max_new_tokens
            for uniform in sampling.uniform_numbers(*numbers):
                logits = self.model(torch.tensor([[*request.prompt, *tokens]])).logits[:, -1]
                at = torch.tensor([uniform]), torch.tensor([len(tokens)])
                token, log_prob = sampling.choose_tokens(logits, *at, asked)
                tokens.append(int(token))
                logs.append(float(log_prob))
                if tokens[-1] in asked.eos_token_ids:
                    break
            self.counts.sampled_tokens += len(tokens)
            ended = rollout_engine.FinishReason.of(tokens, asked)
            result = request.place, tokens, logs, ended, self.weights_version
            yield rollout_engine.GenerationResult(*result)
