"""The demo's models, in plain transformers: a policy half taught, and a reward model."""

from __future__ import annotations

import copy
import random
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from tiny_task import BOS_ID, EOS_ID, PAD_ID, TOKENS, Problem, Split, corrupt
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, LlamaForSequenceClassification

PROMPT_TOKENS = 6
MAX_RESPONSE_TOKENS = 8
START_ACCURACY = (0.42, 0.58)  # of the policy that PPO starts from: taught in part only
KNOWS_ACCURACY = 0.98  # of the language model that the reward model grows from
ID_OF = {token: index for index, token in enumerate(TOKENS)}


@dataclass(frozen=True)
class Policies:
    """start: where PPO begins; skilled: taught to the end, the body of the reward model."""

    start: LlamaForCausalLM
    start_accuracy: float
    skilled: LlamaForCausalLM
    skilled_accuracy: float


def new_policy() -> LlamaForCausalLM:
    """0.73 M parameters."""
    config = LlamaConfig(
        vocab_size=len(TOKENS),
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


def teach_policies(split: Split, seed: int, max_steps: int = 1500) -> Policies:
    """Supervised learning on all problems but the validation ones, with a stop on the way."""
    torch.manual_seed(seed)
    model, start = new_policy(), None
    rows = _solved(split.train + split.spare)
    held_out = _solved(split.val)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, betas=(0.9, 0.95), weight_decay=0.01)
    before, start_accuracy = copy.deepcopy(model), 0.0
    for step in range(1, max_steps + 1):
        _set_rate(optimizer, 2e-3 * min(1.0, step / 20))
        batch = rows[torch.randint(len(rows), (128 if start is None else 256,))]
        logits = model(batch[:, :-1]).logits[:, PROMPT_TOKENS - 1 :]
        target = batch[:, PROMPT_TOKENS:]
        _learn(
            model,
            optimizer,
            F.cross_entropy(logits.flatten(0, 1), target.flatten(), ignore_index=PAD_ID),
        )
        if step % 10:
            continue
        accuracy = greedy_accuracy(model, held_out)
        low, high = START_ACCURACY
        if start is None and accuracy >= low:
            # A jump over the whole range: what was there ten steps before.
            start = copy.deepcopy(model) if accuracy <= high else before
            start_accuracy = greedy_accuracy(start, held_out)
        if accuracy >= KNOWS_ACCURACY:
            assert start is not None
            return Policies(start, start_accuracy, model, accuracy)
        before = copy.deepcopy(model) if start is None else before
    raise RuntimeError(f"supervised learning stayed under {KNOWS_ACCURACY} in {max_steps} steps")


@torch.no_grad()
def greedy_accuracy(model: LlamaForCausalLM, rows: Tensor) -> float:
    """Share of rows whose greedy response is the answer and EOS."""
    model.eval()
    ids = rows[:, :PROMPT_TOKENS]
    for _ in range(rows.size(1) - PROMPT_TOKENS):
        ids = torch.cat([ids, model(ids).logits[:, -1].argmax(-1, keepdim=True)], dim=1)
    model.train()
    return float(((ids == rows) | (rows == PAD_ID)).all(dim=1).float().mean())


def teach_reward_model(
    skilled: LlamaForCausalLM, split: Split, seed: int, steps: int = 200, batch_size: int = 64
) -> tuple[LlamaForSequenceClassification, float]:
    """The skilled policy's body with a score head, taught on comparisons (Bradley-Terry).

    Each problem's right response is compared with three wrong ones.
    Returns the model and its accuracy on comparisons of the validation problems.
    """
    torch.manual_seed(seed)
    rng = random.Random(seed)
    config = copy.deepcopy(skilled.config)
    config.num_labels = 1
    model = LlamaForSequenceClassification(config)
    model.model.load_state_dict(skilled.model.state_dict())
    problems = split.train + split.spare
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.95), weight_decay=0.01)
    for step in range(1, steps + 1):
        _set_rate(optimizer, 1e-3 * min(1.0, step / 20, max(0.02, 2 * (1 - step / steps))))
        batch = [rng.choice(problems) for _ in range(batch_size)]
        right, wrong = _compared(model, batch, 3, rng)
        _learn(model, optimizer, -F.logsigmoid(right - wrong).mean())
    with torch.no_grad():
        right, wrong = _compared(model, split.val, 4, rng)
    return model, float((right > wrong).float().mean())


def save(model: LlamaForCausalLM | LlamaForSequenceClassification, folder: Path) -> None:
    model.save_pretrained(folder)


def _solved(problems: list[Problem]) -> Tensor:
    """[problems, 10] prompt, answer, EOS, padding."""
    return torch.tensor([_row(p, p.answer, True, PROMPT_TOKENS + 4) for p in problems])


def _row(problem: Problem, response: str, ends: bool, width: int) -> list[int]:
    ids = [ID_OF[c] for c in problem.prompt + response] + [EOS_ID] * ends
    return ids + [PAD_ID] * (width - len(ids))


def _compared(
    model: LlamaForSequenceClassification, problems: list[Problem], wrong: int, rng: random.Random
) -> tuple[Tensor, Tensor]:
    """Scores [wrong, problems] of the right responses (repeated) and of `wrong` wrong ones each."""
    width = PROMPT_TOKENS + MAX_RESPONSE_TOKENS
    rows = [_row(p, p.answer, True, width) for p in problems]
    for _ in range(wrong):
        corrupted = (corrupt(p.answer, rng, max_length=MAX_RESPONSE_TOKENS) for p in problems)
        rows += [
            _row(p, text, ends, width) for p, (text, ends) in zip(problems, corrupted, strict=True)
        ]
    ids = torch.tensor(rows)
    last = (ids != PAD_ID).sum(1) - 1
    hidden = model.model(ids[:, : int(last.max()) + 1]).last_hidden_state
    scores = model.score(hidden[torch.arange(len(ids)), last]).view(1 + wrong, len(problems))
    return scores[:1].expand(wrong, -1), scores[1:]


def _set_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    for group in optimizer.param_groups:
        group["lr"] = rate


def _learn(model: torch.nn.Module, optimizer: torch.optim.Optimizer, loss: Tensor) -> None:
    optimizer.zero_grad()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
