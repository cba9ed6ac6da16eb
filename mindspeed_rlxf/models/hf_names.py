"""Where each tensor of a Hugging Face folder is in the parameters of transformers' model.

transformers 5 stacks the experts of a layer in one parameter, while files have one tensor per
expert and projection, and renames some others. The map is found by reverting transformers' own
conversion on small tensors in which every element has a number of its own.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

# Of the small tensors; conversions only split rows into two equal ranges.
ROWS = 4
COLUMNS = 2


@dataclass(frozen=True)
class FileTensor:
    """A tensor in a file, and its place in a parameter.

    Attributes:
        name: In the file.
        expert: Index on the parameter's first axis; None = the whole parameter.
        range_index: Which one of `num_ranges` equal ranges of rows.
        num_ranges: Number of these ranges; 1 = all rows.
        transposed: Whether the file has rows and columns exchanged.
    """

    name: str
    expert: int | None = None
    range_index: int = 0
    num_ranges: int = 1
    transposed: bool = False

    def view(self, parameter: Tensor) -> Tensor:
        """Return the piece as a view of the parameter, in the file's shape."""
        view = parameter if self.expert is None else parameter[self.expert]
        if self.num_ranges > 1:
            view = view.chunk(self.num_ranges)[self.range_index]
        return view.mT if self.transposed else view

    def shape(self, parameter: torch.Size | tuple[int, ...]) -> tuple[int, ...]:
        """Return the shape in the file, for a parameter with this shape."""
        return tuple(self.view(torch.empty(tuple(parameter), device="meta")).shape)


def stored_tensors(model: Any) -> dict[str, Tensor]:
    """Return what a file has of the model: parameters without a tied head, persistent buffers."""
    persistent_names = model.state_dict(keep_vars=True)
    tensors = dict(model.named_parameters())
    for name, buffer in model.named_buffers():
        if name in persistent_names:
            tensors[name] = buffer
    return tensors


def find_pieces(model: Any) -> dict[str, tuple[FileTensor, ...]]:
    """Map each of the model's `stored_tensors`, by name, to the tensors of its file.

    Raises:
        ValueError: transformers converts a parameter in a way other than `FileTensor` can say.
    """
    try:
        from transformers.core_model_loading import revert_weight_conversion
    except ImportError:  # transformers 4, whose parameters are as in files
        return {name: (FileTensor(name),) for name in stored_tensors(model)}
    small = {}
    starts = []  # first element of each small tensor
    count = 0
    for name, parameter in stored_tensors(model).items():
        rows = (parameter.size(0), ROWS) if parameter.dim() == 3 else (ROWS,)
        shape = (*rows, COLUMNS) if parameter.dim() > 1 else rows
        size = torch.Size(shape).numel()
        small[name] = torch.arange(count, count + size, dtype=torch.float64).view(shape)
        starts.append(count)
        count += size
    names = list(small)
    pieces_of_parameter: dict[str, list[FileTensor]] = {name: [] for name in names}
    for stored, tensor in revert_weight_conversion(model, dict(small)).items():
        first_element = tensor.flatten()[0].long()
        name = names[int(torch.searchsorted(torch.tensor(starts), first_element, right=True)) - 1]
        piece = next(_match(stored, tensor, small[name]), None)
        if piece is None:
            raise ValueError(
                f"{type(model).__name__} stores {name} in a form that is not supported; "
                "use another model"
            )
        pieces_of_parameter[name].append(piece)
    for name, pieces in pieces_of_parameter.items():
        if not pieces:
            raise ValueError(f"{type(model).__name__} stores no {name}; use another model")
    return {name: tuple(pieces) for name, pieces in pieces_of_parameter.items()}


def _match(name: str, tensor: Tensor, parameter: Tensor) -> Iterator[FileTensor]:
    experts = [None, *range(len(parameter))] if parameter.dim() == 3 else [None]
    if parameter.dim() == 3 and tensor.dim() < 3:  # which expert is known by the first element
        within = int(tensor.flatten()[0] - parameter.flatten()[0])
        experts = [within // parameter[0].numel()]
    for expert in experts:
        for num_ranges in (1, 2):
            for index in range(num_ranges):
                for transposed in (False, True):
                    transposes = transposed and tensor.dim() > 1
                    piece = FileTensor(name, expert, index, num_ranges, transposes)
                    if torch.equal(piece.view(parameter), tensor):  # False for other shapes
                        yield piece
