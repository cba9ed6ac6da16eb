"""Check at the start that a model computes packed or padded sequences as it computes one alone."""

from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from mindspeed_rlxf import device
from mindspeed_rlxf.engine.fsdp import attention

LENGTHS = (9, 11, 4)
LIMITS = {torch.float32: 1e-3, torch.bfloat16: 0.1}
"""Largest difference of outputs, relative to the largest; leaks are near 1."""


@torch.no_grad()
def probe(engine: Any) -> None:
    """Compare the second of three sequences with itself behind another first, and alone.

    Alone it goes through transformers' plain attention and the model's own head. A collective.

    Raises:
        ValueError: They differ, or the model cannot be called.
    """
    model, name = engine.model, type(engine.model).__name__
    used = min(model.config.vocab_size, 1000)
    ids = torch.arange(sum(LENGTHS)).mul(7).add(1) % used
    second = ids[LENGTHS[0] : sum(LENGTHS[:2])]
    try:
        one = _outputs(engine, ids)
        other = _outputs(engine, torch.cat(((ids[:1] + 1) % used, ids[1:])))
        kind = model.config._attn_implementation
        if kind == attention.NAME:
            model.config._attn_implementation = "eager"
        alone = model(input_ids=second[None].to(device.current_device()), use_cache=False).logits[
            0, :-1
        ]
        model.config._attn_implementation = kind
        trained = _outputs(engine, ids, training=True)
        engine.model.reshard()
    except (TypeError, AttributeError, AssertionError, KeyError) as error:
        text = f"{type(error).__name__}: {error}"
        raise ValueError(f"{name} cannot be run by backend fsdp ({text:.200})") from error
    limit = LIMITS[engine.dtype] * float(alone.float().abs().max().clamp(min=1e-6))
    for found, what in (
        (trained, "dropout or noise changes it in updates"),
        (other, "a token of one sequence changes the next one"),
        (alone, "sequences together and alone have different outputs"),
    ):
        if not float((one - found.float()).abs().max()) <= limit:
            raise ValueError(
                f"{name} must compute each sequence by itself, and {what}; use backend megatron, "
                "or another model"
            )


def _outputs(engine: Any, ids: Tensor, training: bool = False) -> Tensor:
    """Return the head's outputs in the second sequence, but for its last token, fp32."""
    rows = pad_sequence(list(ids.split(LENGTHS)), batch_first=True)
    lengths = torch.tensor(LENGTHS) - 1
    mask = torch.arange(rows.size(1) - 1) < lengths[:, None]
    rollouts: Any = SimpleNamespace(
        prompt_ids=rows[:, :1],
        prompt_lengths=torch.ones_like(lengths),
        response_ids=rows[:, 1:],
        response_lengths=lengths,
        trained_mask=mask,
    )
    (batch,) = engine.as_micro_batches(rollouts, [[0, 1, 2]])
    places = batch.prediction_places(mask & (torch.arange(3) == 1)[:, None])

    def compute(states: Tensor, _: Tensor) -> Tensor:
        return engine.linear(states, engine.model.lm_head.weight).float()

    engine.model.train(training)
    found: Tensor = engine.run(batch, lambda hidden: engine.at(hidden, places, compute))
    return found
