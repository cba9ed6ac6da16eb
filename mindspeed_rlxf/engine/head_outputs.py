"""Compute log-probs, values and scores from a micro-batch's last hidden states.

Axes: tokens = the micro-batch's trained tokens, row after row; slots = positions with a value. The
functions are collectives over the tensor- and context-parallel ranks, and all of these get all
results.
"""

from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor

from mindspeed_rlxf.device.copies import upload
from mindspeed_rlxf.engine.micro_batch import MicroBatch
from mindspeed_rlxf.engine.train_engine import TokenLogProbs
from mindspeed_rlxf.models.context_parallel import compute_at
from mindspeed_rlxf.models.heads import full_kl, token_log_probs


class OutputHead(Protocol):
    """A model's language-model or score head: a `TransformerModel`, or `fsdp.output_head`.

    Attributes:
        tp_group: Ranks that share the rows of `output_weight`, [vocab, hidden].
        linear: Computes logits from states and rows, see `heads.shard_logits`.
    """

    tp_group: Any
    linear: Callable[[Tensor, Tensor], Tensor]

    @property
    def vocab_size(self) -> int:
        """Token ids from here on are padding."""

    @property
    def output_weight(self) -> Tensor:
        """This rank's rows of a language-model head."""

    def score(self, states: Tensor, /) -> Tensor:
        """Score hidden states: [tokens, hidden] -> [tokens] fp32; of a score head."""

    def full_hidden(self, hidden: Tensor, partial_gradient: bool) -> Tensor:
        """Return the tokens of all tensor-parallel ranks, see `TransformerModel.full_hidden`."""


def read_log_probs(
    head: OutputHead, batch: MicroBatch, hidden: Tensor, temperature: float
) -> Tensor:
    """Compute the trained tokens' log-probs, [tokens]."""

    def compute(states: Tensor, labels: Tensor) -> Tensor:
        log_probs, _ = token_log_probs(
            states, head.output_weight, labels, **_settings(head, temperature), with_entropy=False
        )
        return log_probs

    return _compute_at_labels(head, batch, hidden, compute)


def read_log_probs_and_entropies(
    head: OutputHead,
    batch: MicroBatch,
    hidden: Tensor,
    temperature: float,
    trains_entropy: bool,
) -> TokenLogProbs:
    """Compute the trained tokens' log-probs and entropies, [tokens] each.

    Entropies have no gradient unless `trains_entropy`.
    """

    def compute(states: Tensor, labels: Tensor) -> Tensor:
        log_probs, entropies = token_log_probs(
            states, head.output_weight, labels, **_settings(head, temperature)
        )
        if not trains_entropy:
            entropies = entropies.detach()
        return torch.stack((log_probs, entropies), dim=-1)

    log_probs, entropies = _compute_at_labels(head, batch, hidden, compute).unbind(-1)
    return TokenLogProbs(log_probs, entropies if trains_entropy else entropies.detach())


def _settings(head: OutputHead, temperature: float) -> dict[str, Any]:
    return {
        "vocab_size": head.vocab_size,
        "tp_group": head.tp_group,
        "temperature": temperature,
        "linear": head.linear,
    }


def _compute_at_labels(
    head: OutputHead,
    batch: MicroBatch,
    hidden: Tensor,
    compute: Callable[[Tensor, Tensor], Tensor],
) -> Tensor:
    """Compute from the states [tokens, hidden] that predict the trained tokens, and these [tokens].

    Returns the results of all context-parallel ranks, [tokens, ...].
    """

    def compute_own(states: Tensor, numbers: Tensor | None) -> Tensor:
        labels = batch.trained_ids
        if numbers is not None:
            labels = labels[upload(numbers, states.device)]
        return compute(states, labels)

    full = head.full_hidden(hidden, partial_gradient=True)
    places = batch.prediction_places(batch.trained_mask)
    return compute_at(full, places, batch.cp, compute_own)


def read_values(head: OutputHead, batch: MicroBatch, hidden: Tensor, slots: Tensor) -> Tensor:
    """Compute the values for the slots marked in [rows, slots] bool, row after row, fp32.

    A slot's value is the score head's output one token before it (`prediction_places`).
    """
    return _score(head, batch, hidden, batch.prediction_places(slots))


def read_scores(head: OutputHead, batch: MicroBatch, hidden: Tensor) -> Tensor:
    """Compute the score at each row's last token, [rows] fp32."""
    return _score(head, batch, hidden, batch.last_places())


def _score(head: OutputHead, batch: MicroBatch, hidden: Tensor, places: Tensor) -> Tensor:
    full = head.full_hidden(hidden, partial_gradient=False)
    return compute_at(full, places, batch.cp, lambda states, _: head.score(states))


def read_states(head: OutputHead, batch: MicroBatch, hidden: Tensor) -> Tensor:
    """Return the hidden states that predict the trained tokens, [tokens, hidden].

    On the host, where the policy's states of a whole batch wait for the other model's. In memory
    that is not pinned: pinned memory stays with the process, and the batch's is large.
    """
    full = head.full_hidden(hidden, partial_gradient=False)
    places = batch.prediction_places(batch.trained_mask)
    return compute_at(full, places, batch.cp, lambda states, _: states).cpu()


def read_log_probs_and_kl(
    head: OutputHead,
    batch: MicroBatch,
    hidden: Tensor,
    policy_weight: Tensor,
    policy_states: Tensor,
    temperature: float,
) -> Tensor:
    """Compute [2, tokens]: the trained tokens' log-probs, and KL(policy || model) at each.

    `policy_weight` has this rank's rows of the policy's output layer; `policy_states`, [tokens,
    hidden], are its `read_states` for this micro-batch.
    """
    weight = head.output_weight
    settings = _settings(head, temperature)

    def compute(states: Tensor, numbers: Tensor | None) -> Tensor:
        of_policy = policy_states if numbers is None else policy_states[numbers]
        of_policy = upload(of_policy, hidden.device)
        return full_kl(of_policy, policy_weight, states, weight, **settings)

    full = head.full_hidden(hidden, partial_gradient=False)
    kl = compute_at(full, batch.prediction_places(batch.trained_mask), batch.cp, compute)
    return torch.stack((read_log_probs(head, batch, hidden, temperature), kl))
