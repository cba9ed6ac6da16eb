"""Weights of a sharded model: read from a folder, gathered as Hugging Face tensors, exported."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from mindspeed_rlxf.config.schema import RoleConfig
from mindspeed_rlxf.engine.fsdp.model import build
from mindspeed_rlxf.models.adapter_parameters import A, B, initial_values, merge
from mindspeed_rlxf.models.hf_adapters import OUTPUT, inject, is_adapter, plain_name
from mindspeed_rlxf.models.hf_names import Piece, find_pieces, stored_tensors
from mindspeed_rlxf.models.parameters import Head
from mindspeed_rlxf.weights.chunks import StoredTensor, StoredWeights, whole
from mindspeed_rlxf.weights.hf_folder import open_hf_folder
from mindspeed_rlxf.weights.tensor_checks import tensor_problems

SCORE = "score.weight"
WRAPPED = "model.language_model."  # prefix in folders of models that also see images

Pieces = dict[str, tuple[Piece, ...]]


@dataclass(frozen=True)
class Held:
    """A parameter or buffer of the model on this rank.

    Attributes:
        name: In the model (`plain_name`).
        local: This rank's rows, in the storage that the model uses.
        start: The first of these rows.
        shape: Of the whole tensor.
        is_sharded: False = each rank has all rows (a buffer).
    """

    name: str
    local: Tensor
    start: int
    shape: tuple[int, ...]
    is_sharded: bool

    def gather(self) -> Tensor:
        """Return the whole tensor; a collective over all ranks."""
        if not self.is_sharded or dist.get_world_size() == 1:
            return self.local
        ranks = dist.get_world_size()
        rows = rows_per_rank(self.shape[0], ranks)
        padded = self.local.new_zeros(rows, *self.shape[1:])
        padded[: len(self.local)] = self.local
        found = padded.new_empty(ranks * rows, *self.shape[1:])
        dist.all_gather(list(found.chunk(ranks)), padded)
        return found[: self.shape[0]]


def rows_per_rank(rows: int, ranks: int) -> int:
    """Return the rows of a rank's shard; the last ranks may have fewer, or none."""
    return -(-rows // ranks)


def held_tensors(model: Any) -> list[Held]:
    """Return the model's `stored_tensors` on this rank, in order; none is unsharded now."""
    found = []
    for name, tensor in stored_tensors(model).items():
        local, start, is_sharded = tensor.detach(), 0, isinstance(tensor, DTensor)
        if isinstance(tensor, DTensor):
            local = tensor.to_local().detach()
            rows = rows_per_rank(tensor.size(0), dist.get_world_size())
            start = min(dist.get_rank() * rows, tensor.size(0))
        found.append(Held(plain_name(name), local, start, tuple(tensor.shape), is_sharded))
    return found


def pieces_of(model: Any, head: Head) -> Pieces:
    """Return `find_pieces` with the score head's name in files. Raises ValueError."""
    found = find_pieces(model)
    if head is Head.SCORE:
        found[OUTPUT] = (Piece(SCORE),)
    return found


def file_shapes(model: Any, pieces: Pieces) -> dict[str, tuple[int, ...]]:
    """Return name and shape of each tensor in the model's folder."""
    shapes = {name: tuple(tensor.shape) for name, tensor in stored_tensors(model).items()}
    return {
        piece.name: piece.shape(shapes[name])
        for name, of_name in pieces.items()
        for piece in of_name
    }


def find_stored(folder: StoredWeights, name: str) -> StoredTensor | None:
    """Return the folder's tensor, whether or not its names have WRAPPED; None if it lacks it."""
    return folder.get(name) or folder.get(name.replace("model.", WRAPPED, 1))


def check_folder(role: RoleConfig, head: Head) -> None:
    """Raise ValueError unless the role's folder has the weights of the model in its config.json.

    UserError if `lora` selects no module. A score head may be absent. Reads headers only, except of
    tied tensors, and builds the model without memory.
    """
    assert role.load is not None, "checked beforehand"
    model = build(role.load, head, torch.float32)
    pieces = pieces_of(model, head)
    floats = {n: pieces[n] for n, t in stored_tensors(model).items() if t.is_floating_point()}
    shapes = file_shapes(model, floats)
    tied = find_tied(model, pieces)
    ignored = list(model._keys_to_ignore_on_load_unexpected or ())
    num_layers = model.config.num_hidden_layers
    for number in range(getattr(model.config, "num_nextn_predict_layers", None) or 0):
        ignored.append(rf"^model\.layers\.{num_layers + number}\.")  # behind the other layers
    if role.adapters.rank:
        inject(model, role.adapters)
    folder = plain_names(open_hf_folder(role.load, role.trust_files))
    if head is Head.SCORE and SCORE not in folder:
        del shapes[SCORE]
    if problems := tensor_problems(role.load, folder, shapes, head, tied, ignored):
        raise ValueError(f"{problems[0]}; give the folder of a whole {type(model).__name__}")


def find_tied(model: Any, pieces: Pieces) -> dict[str, str]:
    """Return each tensor that files may have beside a tied one -> the one that it must equal."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    return {
        name: pieces[names[id(tensor)]][0].name
        for name, tensor in model.state_dict(keep_vars=True).items()
        if names.get(id(tensor), name) != name
    }


def plain_names(folder: StoredWeights) -> StoredWeights:
    """Return the language model's tensors without WRAPPED in their names, and nothing else.

    A folder whose names do not have it is returned as it is.
    """
    if not any(name.startswith(WRAPPED) for name in folder):
        return folder
    kept = (name for name in folder if name.startswith((WRAPPED, "lm_head.", "score.")))
    return {name.replace(WRAPPED, "model.", 1): folder[name] for name in kept}


def load_rows(held: Iterable[Held], pieces: Pieces, folder: StoredWeights) -> list[str]:
    """Copy each tensor's rows on this rank from the folder, in place; return absent file tensors.

    Raises ValueError for a tensor with another shape.
    """
    absent = []
    for each in held:
        for piece in pieces.get(each.name, ()):  # an adapter has none
            stored = find_stored(folder, piece.name)
            if stored is None:
                absent.append(piece.name)
                continue
            if stored.shape != (shape := piece.shape(each.shape)):
                rule = f"{piece.name} is {list(stored.shape)}, the model needs {list(shape)}"
                raise ValueError(f"{rule}; give the folder of that model")
            _copy_rows(each, piece, stored)
    return absent


def reset_adapters(held: Iterable[Held], seed: int) -> None:
    """Set the adapters among these to their first values, which add nothing."""
    for each in held:
        if is_adapter(each.name):
            rows = slice(each.start, each.start + len(each.local))
            each.local.copy_(initial_values(each.name, each.shape, seed)[rows])


def gather_on_first_rank(held: Iterable[Held]) -> dict[str, Tensor]:
    """Return whole tensors on the first rank's host, the score head by its name in files."""
    gathered = ((SCORE if each.name == OUTPUT else each.name, each.gather()) for each in held)
    return {name: tensor.cpu() for name, tensor in gathered if dist.get_rank() == 0}


def _copy_rows(held: Held, piece: Piece, stored: StoredTensor) -> None:
    rows, everything = range(held.start, held.start + len(held.local)), whole(stored.shape)
    if piece.expert is not None:
        if piece.expert in rows:
            own = replace(piece, expert=piece.expert - held.start)
            own.view(held.local).copy_(stored.read(everything))
    elif piece.parts == 1 and rows:
        axis = len(stored.shape) - 1 if piece.transposed else 0
        read = stored.read(everything.narrow(axis, rows.start, len(rows)))
        held.local.copy_(read.mT if piece.transposed else read)
    elif rows:  # one of several ranges of rows
        size = held.shape[0] // piece.parts
        first, last = max(rows.start, piece.part * size), min(rows.stop, (piece.part + 1) * size)
        if first < last:
            part = everything.narrow(0, first - piece.part * size, last - first)
            held.local[first - held.start : last - held.start] = stored.read(part)


def stream(
    held: Sequence[Held], pieces: Pieces, dtype: torch.dtype, scale: float | None = None
) -> Iterator[tuple[str, Tensor]]:
    """Yield every weight as (name in files, whole device tensor), on every rank; a collective.

    Adapters are left out, or with `scale`, their factor, merged into copies.
    """
    adapters = {each.name: each for each in held if is_adapter(each.name)}
    for each in held:
        if each.name in adapters:
            continue
        whole_tensor = each.gather()
        if each.is_sharded:
            whole_tensor = whole_tensor.to(dtype)
        module = each.name.removesuffix("weight")
        if scale is not None and f"{module}{A}.weight" in adapters:
            a, b = (adapters[f"{module}{part}.weight"].gather() for part in (A, B))
            whole_tensor = whole_tensor.clone()
            merge(whole_tensor, a, b, scale)
        for piece in pieces[each.name]:
            yield piece.name, piece.view(whole_tensor).contiguous()


def adapter_stream(held: Iterable[Held], dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
    """Yield each adapter's A and B like `stream`, in the dtype in which they compute."""
    for tensor in held:
        if is_adapter(tensor.name):
            yield tensor.name, tensor.gather().to(dtype)
