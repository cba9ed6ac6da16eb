"""The training data and losses of the demo's models; no model is trained to its full accuracy."""

from types import SimpleNamespace

import torch
import torch.nn.functional as F
import train_models
from tiny_task import BOS_ID, EOS_ID, PAD_ID, TOKENS, Problem
from torch import Tensor

PROBLEMS = [Problem(12, 34), Problem(50, 50), Problem(99, 99)]


def ids_of(text: str) -> list[int]:
    return [TOKENS.index(c) for c in text]


class Calculator:
    """Answers every prompt in one way: the sum plus `off`."""

    def __init__(self, off: int = 0) -> None:
        self.off = off

    def __call__(self, ids: Tensor) -> SimpleNamespace:
        logits = torch.full((*ids.shape, len(TOKENS)), -1e9)
        for row, tokens in enumerate(ids.tolist()):
            left, right = "".join(TOKENS[i] for i in tokens[:5]).split("+")
            answer = [*ids_of(str(int(left) + int(right) + self.off)), EOS_ID, *[PAD_ID] * 9]
            logits[row, -1, answer[len(tokens) - 6]] = 0.0
        return SimpleNamespace(logits=logits)


def test_greedy_accuracy_counts_rows_that_are_right_to_the_end() -> None:
    rows = train_models._answer_rows(PROBLEMS, [p.answer for p in PROBLEMS])
    assert train_models.greedy_accuracy(Calculator(), rows) == 1.0
    assert train_models.greedy_accuracy(Calculator(off=1), rows) == 0.0
    rows[0, 7] = ids_of("9")[0]  # 12+34=4[9]
    assert abs(train_models.greedy_accuracy(Calculator(), rows) - 2 / 3) < 1e-6


class Scorer(torch.nn.Module):
    """Stands for the reward model: an embedding is all it has, the score is its last entry."""

    def __init__(self, score_of: dict[int, float]) -> None:
        super().__init__()
        table = torch.zeros(len(TOKENS), 2)
        for token, score in score_of.items():
            table[token, 1] = score
        self.embed_tokens = torch.nn.Embedding.from_pretrained(table)
        self.model = self

    def forward(self, ids: Tensor) -> SimpleNamespace:
        return SimpleNamespace(last_hidden_state=self.embed_tokens(ids))

    def score(self, hidden: Tensor) -> Tensor:
        return hidden[..., 1:]


def test_the_comparison_reads_the_last_token_and_every_differing_prefix() -> None:
    seven = ids_of("7")[0]
    model = Scorer({EOS_ID: 2.0, seven: 1.0, BOS_ID: 9.0})
    right = torch.tensor([[*ids_of("12+34=46"), EOS_ID, PAD_ID]])
    wrong = torch.tensor([[*ids_of("12+34=47"), PAD_ID, PAD_ID]])
    # Last tokens: EOS 2.0 against `7` 1.0. Prefixes from the difference on: `6` 0 against `7` 1,
    # then EOS against `7` twice (the end is repeated).
    last = -F.logsigmoid(torch.tensor(1.0))
    prefixes = (-F.logsigmoid(torch.tensor(-1.0)) + 2 * last) / 3
    # The language model's loss: logits are score(token) * score(candidate), targets `4`, `6`, EOS
    # after `=`, `4`, `6`, whose own scores are 0, so that all 16 candidates are alike.
    language = torch.log(torch.tensor(float(len(TOKENS))))
    torch.testing.assert_close(
        train_models._comparison_loss(model, right, wrong), last + prefixes + language
    )
