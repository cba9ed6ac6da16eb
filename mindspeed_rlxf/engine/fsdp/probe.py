"""Check at the start that a model computes packed or padded sequences as it computes one alone."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from mindspeed_rlxf import device
from mindspeed_rlxf.engine.fsdp import attention
from mindspeed_rlxf.engine.fsdp.model import original_length, packs, runs_rows_alone, window_of
from mindspeed_rlxf.models.context_parallel import compute_at

LENGTHS = {"probed": 40, "neighbour": 9, "filler": 4}
"""Tokens of the three sequences that are packed together."""
ALONE = {torch.float32: 1e-3, torch.bfloat16: 0.1}
"""Largest difference from plain attention, as root mean square, relative to that of the outputs."""
LEAST = {torch.float32: 1e-5, torch.bfloat16: 0.02}
"""Difference between two packings that is always allowed, in the same measure."""
ROUNDINGS = 3
"""Allowed difference between two packings, relative to that from plain attention."""


@torch.no_grad()
def probe(engine: Any, longest_row: int) -> None:
    """Compare a sequence behind another one with itself in front of it, and alone.

    The sequence in front reaches positions at which scaled rotary embeddings may change; if an
    angle depends on it, the one behind sees that. Causal layers leak nothing backwards, so the
    difference in front from transformers' plain attention and the model's own head is rounding,
    and that behind must not be much larger. A collective.

    Raises:
        ValueError: They differ, the model cannot be called, or its attention gets no window though
            a row of `longest_row` tokens needs one.
    """
    model = engine.model
    name = type(model).__name__
    num_ids = min(model.config.vocab_size, 1000)
    ids = torch.arange(sum(LENGTHS.values())).mul(7).add(1) % num_ids
    probed, neighbour, filler = ids.split(list(LENGTHS.values()))
    try:
        front = _outputs(engine, [probed, neighbour, filler], 0)
        behind = _outputs(engine, [neighbour, probed, filler], 1)
        kind = model.config._attn_implementation
        if kind == attention.NAME:
            model.config._attn_implementation = "eager"
        row = probed[None].to(device.current_device())
        alone = model(input_ids=row, use_cache=False).logits[0, :-1]
        model.config._attn_implementation = kind
        trained = _outputs(engine, [neighbour, probed, filler], 1, training=True)
        engine.model.reshard()
    except (TypeError, AttributeError, AssertionError, KeyError) as error:
        text = f"{type(error).__name__}: {error}"
        raise ValueError(f"{name} cannot be run by backend fsdp ({text:.200})") from error
    size = _root_mean_square(alone.float()).clamp(min=1e-6)
    rounding = _root_mean_square(front - alone.float())
    alone_limit = ALONE[engine.dtype] * size
    packing_limit = max(ROUNDINGS * rounding, LEAST[engine.dtype] * size)
    packing_limit = min(packing_limit, alone_limit)
    for difference, limit, cause in (
        (trained - behind, packing_limit, "dropout or noise changes it in updates"),
        (behind - front, packing_limit, "a sequence changes the next one"),
        (front - alone.float(), alone_limit, "sequences together and alone have different outputs"),
    ):
        if not _root_mean_square(difference) <= limit:  # also for NaN
            raise ValueError(
                f"{name} must compute each sequence by itself, and {cause}; use backend megatron, "
                "or another model"
            )
    window = window_of(model.config)
    if packs(model) and window is not None and window < longest_row and engine.windows == {None}:
        raise ValueError(
            f"{name} has its sliding_window={window} in a mask, which backend fsdp does not read, "
            f"and rows have up to {longest_row} tokens; use max_prompt_length and max_new_tokens "
            f"of at most {window} together, or another model"
        )


def _root_mean_square(outputs: Tensor) -> Tensor:
    return outputs.square().mean().sqrt()


def _outputs(engine: Any, rows: list[Tensor], probed: int, training: bool = False) -> Tensor:
    """Return the head's outputs in the row `probed`, but for its last token, fp32."""
    if runs_rows_alone(engine.model):
        rows = [rows[probed]]
        probed = 0
    padded = pad_sequence(rows, batch_first=True)
    lengths = torch.tensor([len(row) - 1 for row in rows])
    mask = torch.arange(padded.size(1) - 1) < lengths[:, None]
    rollouts: Any = SimpleNamespace(
        prompt_ids=padded[:, :1],
        prompt_lengths=torch.ones_like(lengths),
        response_ids=padded[:, 1:],
        response_lengths=lengths,
        trained_mask=mask,
    )
    (batch,) = engine.as_micro_batches(rollouts, [list(range(len(rows)))])
    far = 16 * original_length(engine.model.config)
    if probed > 0 and far > 0:
        # Rotary embeddings see distances between positions alone, so its own results stay.
        packed = batch.lengths is not None
        positions = batch.positions.clone() if packed else batch.positions.repeat(len(rows), 1)
        in_front = positions[: len(rows[0])] if packed else positions[0]
        in_front += far
        batch = replace(batch, positions=positions)
    positions_read = batch.prediction_places(mask & (torch.arange(len(rows)) == probed)[:, None])

    head = engine.output_head

    def compute(states: Tensor, _: Tensor | None) -> Tensor:
        return head.linear(states, head.output_weight).float()

    engine.model.train(training)
    outputs: Tensor = engine.run(
        batch, lambda hidden: compute_at(hidden, positions_read, batch.cp, compute)
    )
    return outputs
