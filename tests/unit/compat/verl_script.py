"""A script with verl's ways to score: a function that selects, and managers."""

import torch

from mindspeed_rlxf.api import RewardManager, gsm8k


def half(solution_str, ground_truth):
    return 0.5 * (solution_str == ground_truth)


def _select_rm_score_fn(data_source):
    if data_source == "openai/gsm8k":
        return gsm8k.compute_score
    if data_source == "half":
        return half
    raise NotImplementedError


def weighted(solution_str, ground_truth, data_source, extra_info=None, weight=1.0):
    return {"score": weight * len(ground_truth["target"]), "pred": solution_str, "none": None}


def make_manager(tokenizer, num_examine):
    return RewardManager(tokenizer, num_examine)


class Selecting(RewardManager):
    def _select_rm_score_fn(self, data_source):
        return half


class Calling:
    """verl's first manager, with a parameter of its own."""

    def __init__(self, tokenizer, num_examine, bonus=0.0):
        self.tokenizer, self.num_examine, self.bonus = tokenizer, num_examine, bonus

    def __call__(self, data):
        rewards = torch.zeros_like(data.batch["responses"], dtype=torch.float32)
        assert "rm_scores" not in data.batch.keys()  # noqa: SIM118  as in verl
        for i in range(len(data)):
            item = data[i]
            width = item.batch["prompts"].shape[-1]
            length = item.batch["attention_mask"][width:].sum()
            text = self.tokenizer.decode(item.batch["responses"][:length])
            truth = item.non_tensor_batch["reward_model"]["ground_truth"]
            score = _select_rm_score_fn(item.non_tensor_batch["data_source"])(text, truth)
            rewards[i, length - 1] = score + self.bonus
        return rewards


class WithExtras(RewardManager):
    def __call__(self, data, return_dict=False):
        rewards = torch.ones_like(data.batch["responses"], dtype=torch.float32)
        extras = {"level": [item.non_tensor_batch["extra_info"]["level"] for item in data]}
        return {"reward_tensor": rewards, "reward_extra_info": extras} if return_dict else rewards


class Unmade(RewardManager):
    def __init__(self, tokenizer, judge):
        super().__init__(tokenizer, 0)
        self.judge = judge

    def __call__(self, data):
        return self.judge(data)


class Nothing:
    pass
