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
from mindspeed_rlxf.models.hf_names import FileTensor, find_pieces, stored_tensors
from mindspeed_rlxf.models.parameters import Head
from mindspeed_rlxf.weights.chunks import StoredTensor, StoredWeights, whole
from mindspeed_rlxf.weights.hf_folder import open_hf_folder
from mindspeed_rlxf.weights.tensor_checks import tensor_problems

SCORE = "score.weight"
WRAPPED = "model.language_model."  # prefix in folders of models that also see images

Pieces = dict[str, tuple[FileTensor, ...]]


@dataclass(frozen=True)
class TensorShard:
    """A parameter or buffer of the model on this rank.

    With 4 ranks, rank 1 of `q_proj.weight` [10, 8] has start=3, local [3, 8] and shape (10, 8).

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
        num_ranks = dist.get_world_size()
        num_rows = rows_per_rank(self.shape[0], num_ranks)
        padded = self.local.new_zeros(num_rows, *self.shape[1:])
        padded[: len(self.local)] = self.local
        gathered = padded.new_empty(num_ranks * num_rows, *self.shape[1:])
        dist.all_gather(list(gathered.chunk(num_ranks)), padded)
        return gathered[: self.shape[0]]


def rows_per_rank(rows: int, ranks: int) -> int:
    """Return the rows of a rank's shard; the last ranks may have fewer, or none."""
    return -(-rows // ranks)


def local_shards(model: Any) -> list[TensorShard]:
    """Return the model's `stored_tensors` on this rank, in order; none is unsharded now."""
    shards = []
    for name, tensor in stored_tensors(model).items():
        shape = tuple(tensor.shape)
        if isinstance(tensor, DTensor):
            local = tensor.to_local().detach()
            num_rows = rows_per_rank(tensor.size(0), dist.get_world_size())
            start = min(dist.get_rank() * num_rows, tensor.size(0))
            shards.append(TensorShard(plain_name(name), local, start, shape, is_sharded=True))
        else:
            local = tensor.detach()
            shards.append(TensorShard(plain_name(name), local, 0, shape, is_sharded=False))
    return shards


def pieces_of(model: Any, head: Head) -> Pieces:
    """Return `find_pieces` with the score head's name in files. Raises ValueError."""
    pieces = find_pieces(model)
    if head is Head.SCORE:
        pieces[OUTPUT] = (FileTensor(SCORE),)
    return pieces


def file_shapes(model: Any, pieces: Pieces) -> dict[str, tuple[int, ...]]:
    """Return name and shape of each tensor in the model's folder."""
    tensors = stored_tensors(model)
    shapes = {}
    for name, pieces_of_tensor in pieces.items():
        for piece in pieces_of_tensor:
            shapes[piece.name] = piece.shape(tuple(tensors[name].shape))
    return shapes


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
    float_pieces = {}
    for name, tensor in stored_tensors(model).items():
        if tensor.is_floating_point():
            float_pieces[name] = pieces[name]
    shapes = file_shapes(model, float_pieces)
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
    problems = tensor_problems(role.load, folder, shapes, head, tied, ignored)
    if problems:
        raise ValueError(f"{problems[0]}; give the folder of a whole {type(model).__name__}")


def find_tied(model: Any, pieces: Pieces) -> dict[str, str]:
    """Return each tensor that files may have beside a tied one -> the one that it must equal."""
    name_of_parameter = {id(parameter): name for name, parameter in model.named_parameters()}
    tied = {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        first_name = name_of_parameter.get(id(tensor), name)
        if first_name != name:
            tied[name] = pieces[first_name][0].name
    return tied


def plain_names(folder: StoredWeights) -> StoredWeights:
    """Return the language model's tensors without WRAPPED in their names, and nothing else.

    A folder whose names do not have it is returned as it is.
    """
    if not any(name.startswith(WRAPPED) for name in folder):
        return folder
    plain = {}
    for name in folder:
        if name.startswith((WRAPPED, "lm_head.", "score.")):
            plain[name.replace(WRAPPED, "model.", 1)] = folder[name]
    return plain


def load_rows(shards: Iterable[TensorShard], pieces: Pieces, folder: StoredWeights) -> list[str]:
    """Copy each tensor's rows on this rank from the folder, in place; return absent file tensors.

    Raises ValueError for a tensor with another shape.
    """
    absent = []
    for shard in shards:
        for piece in pieces.get(shard.name, ()):  # an adapter has none
            stored = find_stored(folder, piece.name)
            if stored is None:
                absent.append(piece.name)
                continue
            shape = piece.shape(shard.shape)
            if stored.shape != shape:
                rule = f"{piece.name} is {list(stored.shape)}, the model needs {list(shape)}"
                raise ValueError(f"{rule}; give the folder of that model")
            _copy_rows(shard, piece, stored)
    return absent


def reset_adapters(shards: Iterable[TensorShard], seed: int) -> None:
    """Set the adapters among these to their first values, which add nothing."""
    for shard in shards:
        if is_adapter(shard.name):
            rows = slice(shard.start, shard.start + len(shard.local))
            shard.local.copy_(initial_values(shard.name, shard.shape, seed)[rows])


def gather_on_first_rank(shards: Iterable[TensorShard]) -> dict[str, Tensor]:
    """Return whole tensors on the first rank's host, the score head by its name in files."""
    tensors = {}
    for shard in shards:
        name = SCORE if shard.name == OUTPUT else shard.name
        tensor = shard.gather()  # on every rank, as it is a collective
        if dist.get_rank() == 0:
            tensors[name] = tensor.cpu()
    return tensors


def _copy_rows(shard: TensorShard, piece: FileTensor, stored: StoredTensor) -> None:
    rows = range(shard.start, shard.start + len(shard.local))
    chunk = whole(stored.shape)
    if piece.expert is not None:
        if piece.expert in rows:
            local_piece = replace(piece, expert=piece.expert - shard.start)
            local_piece.view(shard.local).copy_(stored.read(chunk))
    elif piece.num_ranges == 1 and rows:
        axis = len(stored.shape) - 1 if piece.transposed else 0
        tensor = stored.read(chunk.narrow(axis, rows.start, len(rows)))
        shard.local.copy_(tensor.mT if piece.transposed else tensor)
    elif rows:  # one of several ranges of rows
        size = shard.shape[0] // piece.num_ranges
        piece_start = piece.range_index * size
        start = max(rows.start, piece_start)
        stop = min(rows.stop, piece_start + size)
        if start < stop:
            tensor = stored.read(chunk.narrow(0, start - piece_start, stop - start))
            shard.local[start - shard.start : stop - shard.start] = tensor


def stream(
    shards: Sequence[TensorShard], pieces: Pieces, dtype: torch.dtype, scale: float | None = None
) -> Iterator[tuple[str, Tensor]]:
    """Yield every weight as (name in files, whole device tensor), on every rank; a collective.

    Adapters are left out, or with `scale`, their factor, merged into copies.
    """
    adapters = {shard.name: shard for shard in shards if is_adapter(shard.name)}
    for shard in shards:
        if shard.name in adapters:
            continue
        whole_tensor = shard.gather()
        if shard.is_sharded:
            whole_tensor = whole_tensor.to(dtype)
        module = shard.name.removesuffix("weight")
        if scale is not None and f"{module}{A}.weight" in adapters:
            a = adapters[f"{module}{A}.weight"].gather()
            b = adapters[f"{module}{B}.weight"].gather()
            whole_tensor = whole_tensor.clone()
            merge(whole_tensor, a, b, scale)
        for piece in pieces[shard.name]:
            yield piece.name, piece.view(whole_tensor).contiguous()


def adapter_stream(
    shards: Iterable[TensorShard], dtype: torch.dtype
) -> Iterator[tuple[str, Tensor]]:
    """Yield each adapter's A and B like `stream`, in the dtype in which they compute."""
    for shard in shards:
        if is_adapter(shard.name):
            yield shard.name, shard.gather().to(dtype)
