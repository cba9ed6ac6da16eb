"""Train the demo's models in plain transformers: a policy often dropping a carry, a reward model.

Both are Llamas with the same shape; the reward model starts from the policy's weights.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from tiny_task import BOS_ID, EOS_ID, PAD_ID, TOKENS, Problem, Split, corrupt
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, LlamaForSequenceClassification

PROMPT_TOKENS = 6
MAX_RESPONSE_TOKENS = 8
WITHOUT_CARRY = 0.75  # share of the training sums without the carry from the ones to the tens
START_ACCURACY = (0.45, 0.6)  # range for the accuracy of the policy that PPO starts from
ID_OF = {token: index for index, token in enumerate(TOKENS)}


@dataclass(frozen=True)
class Pretrained:
    """A policy and its greedy accuracy on the validation problems, 0 to 1."""

    model: LlamaForCausalLM
    accuracy: float


def new_policy(vocab_size: int = len(TOKENS)) -> LlamaForCausalLM:
    """Return a random Llama with 0.79 M parameters.

    With its large initial weights it needs half as many steps to learn sums.
    """
    config = LlamaConfig(
        vocab_size=vocab_size,
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        tie_word_embeddings=True,
        rms_norm_eps=1e-5,
        initializer_range=0.06,
        pad_token_id=PAD_ID,
        bos_token_id=BOS_ID,
        eos_token_id=EOS_ID,
    )
    return LlamaForCausalLM(config)


def pretrain_policy(split: Split, seed: int, steps: int = 350, batch_size: int = 128) -> Pretrained:
    """Pretrain a policy on all problems but the validation ones; most sums drop the carry.

    The policy learns to add, and to drop the carry as often as its data: greedy responses always
    drop it, sampled ones are sometimes right, which PPO can reinforce. Raises RuntimeError if the
    greedy accuracy is outside START_ACCURACY.
    """
    torch.manual_seed(seed)
    model = new_policy()
    problems = split.train + split.spare
    right = _answer_rows(problems, [p.answer for p in problems])
    without_carry = _answer_rows(problems, [p.answer_without_carry for p in problems])

    def draw() -> tuple[Tensor, Tensor]:
        drawn = torch.randint(len(problems), (batch_size,))
        errs = torch.rand(batch_size, 1) < WITHOUT_CARRY
        batch = torch.where(errs, without_carry[drawn], right[drawn])
        return batch, batch[:, PROMPT_TOKENS:]

    pretrain(model, draw, steps)
    accuracy = greedy_accuracy(model, _answer_rows(split.val, [p.answer for p in split.val]))
    low, high = START_ACCURACY
    if not low <= accuracy <= high:
        raise RuntimeError(f"accuracy {accuracy:.1%} of the policy must be {low:.0%} to {high:.0%}")
    return Pretrained(model, accuracy)


def pretrain(
    model: LlamaForCausalLM, draw: Callable[[], tuple[Tensor, Tensor]], steps: int
) -> None:
    """Train a language model on rows that `draw` returns: ids, and their last ids as targets.

    Both are [rows, tokens]; targets PAD_ID are not learnt.
    """
    optimizer = _optimizer(model)
    for step in range(1, steps + 1):
        _set_rate(optimizer, 2e-3 * _trapezoid(step, steps))
        batch, targets = draw()
        logits = model(batch[:, :-1]).logits[:, -targets.size(1) :]
        _learn(model, optimizer, _cross_entropy(logits, targets))


@torch.no_grad()
def greedy_accuracy(model: LlamaForCausalLM, rows: Tensor) -> float:
    """Return the fraction of rows whose greedy response is the answer and EOS."""
    ids = rows[:, :PROMPT_TOKENS]
    for _ in range(rows.size(1) - PROMPT_TOKENS):
        ids = torch.cat([ids, model(ids).logits[:, -1].argmax(-1, keepdim=True)], dim=1)
    return float(((ids == rows) | (rows == PAD_ID)).all(dim=1).float().mean())


def train_reward_model(
    policy: LlamaForCausalLM, split: Split, seed: int, steps: int = 600, batch_size: int = 64
) -> tuple[LlamaForSequenceClassification, float]:
    """Train a reward model to score a prompt's right response above a wrong one.

    The loss is Bradley and Terry's at the last token, plus the auxiliary losses in
    _comparison_loss. Returns the model and its accuracy on four comparisons per validation problem.
    """
    torch.manual_seed(seed)
    rng = random.Random(seed)
    config = copy.deepcopy(policy.config)
    config.num_labels = 1
    model = LlamaForSequenceClassification(config)
    model.model.load_state_dict(policy.model.state_dict())
    torch.nn.init.zeros_(model.score.weight)
    problems = split.train + split.spare
    mistakes = sample_mistakes(policy, problems)
    optimizer = _optimizer(model)
    for step in range(1, steps + 1):
        _set_rate(optimizer, 1e-3 * _trapezoid(step, steps))
        batch = rng.choices(problems, k=batch_size)
        _learn(model, optimizer, _comparison_loss(model, *_pairs(batch, mistakes, rng)))
    right, wrong = _pairs(split.val * 4, sample_mistakes(policy, split.val), rng)
    with torch.no_grad():
        better = model(right).logits > model(wrong).logits
    return model, float(better.float().mean())


@torch.no_grad()
def sample_mistakes(policy: LlamaForCausalLM, problems: list[Problem]) -> dict[Problem, str]:
    """Sample one response per problem at temperature 1; return the complete but wrong ones."""
    ids = torch.tensor([_row(p, "", False, PROMPT_TOKENS) for p in problems])
    for _ in range(MAX_RESPONSE_TOKENS):
        chances = policy(ids).logits[:, -1].softmax(-1)
        ids = torch.cat([ids, torch.multinomial(chances, 1)], dim=1)
    mistakes = {}
    for problem, row in zip(problems, ids[:, PROMPT_TOKENS:].tolist(), strict=True):
        text = "".join(TOKENS[i] for i in row[: row.index(EOS_ID)]) if EOS_ID in row else ""
        if text.isdigit() and text != problem.answer:
            mistakes[problem] = text
    return mistakes


def _comparison_loss(model: LlamaForSequenceClassification, right: Tensor, wrong: Tensor) -> Tensor:
    """Return the comparison loss at the last token plus two auxiliary losses.

    They are the same comparison at each token from the first difference on, and the language
    model's loss on the right response. Without them the accuracy stays near 84%. Both inputs are
    [pairs, tokens], right-padded.
    """
    ids = torch.cat([right, wrong])
    hidden = model.model(ids).last_hidden_state
    # The last token of each prefix that ends in the response; after the end the last one repeats.
    ends = (ids != PAD_ID).sum(1, keepdim=True) - 1
    prefixes = torch.arange(PROMPT_TOKENS, ids.size(1)).expand(len(ids), -1).minimum(ends)
    better, worse = model.score(hidden)[..., 0].gather(1, prefixes).chunk(2)
    compared = -F.logsigmoid(better - worse)
    differs = (right != wrong)[:, PROMPT_TOKENS:].cumsum(1) > 0
    logits = hidden[: len(right), PROMPT_TOKENS - 1 : -1] @ model.model.embed_tokens.weight.T
    return (
        compared[:, -1].mean()
        + compared[differs].mean()
        + _cross_entropy(logits, right[:, PROMPT_TOKENS:])
    )


def _pairs(
    problems: list[Problem], mistakes: dict[Problem, str], rng: random.Random
) -> tuple[Tensor, Tensor]:
    """Return a right and a wrong response to each problem, each [problems, prompt + response] ids.

    The wrong one is the policy's own mistake, if it made one, in half the cases; otherwise a
    corrupted answer.
    """
    width = PROMPT_TOKENS + MAX_RESPONSE_TOKENS
    right, wrong = [], []
    for problem in problems:
        response = corrupt(problem.answer, rng, max_length=MAX_RESPONSE_TOKENS)
        if problem in mistakes and rng.random() < 0.5:
            response = (mistakes[problem], True)
        right.append(_row(problem, problem.answer, True, width))
        wrong.append(_row(problem, *response, width))
    return torch.tensor(right), torch.tensor(wrong)


def _answer_rows(problems: list[Problem], answers: list[str]) -> Tensor:
    """Return [problems, 10] ids: prompt, answer, EOS, padding."""
    width = PROMPT_TOKENS + 4
    return torch.tensor([_row(p, a, True, width) for p, a in zip(problems, answers, strict=True)])


def _row(problem: Problem, response: str, ends: bool, width: int) -> list[int]:
    """Return ids for prompt and response, with EOS if it ends, padded to `width`."""
    ids = [ID_OF[c] for c in problem.prompt + response] + [EOS_ID] * ends
    return ids + [PAD_ID] * (width - len(ids))


def _cross_entropy(logits: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), target.flatten(), ignore_index=PAD_ID)


def _optimizer(model: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=2e-3, betas=(0.9, 0.95), weight_decay=0.01)


def _trapezoid(step: int, steps: int) -> float:
    """Return the learning rate's factor: 20 steps up, and down to 2% in the second half."""
    return min(1.0, step / 20, max(0.02, 2 * (1 - step / steps)))


def _set_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    for group in optimizer.param_groups:
        group["lr"] = rate


def _learn(model: torch.nn.Module, optimizer: torch.optim.Optimizer, loss: Tensor) -> None:
    optimizer.zero_grad()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
