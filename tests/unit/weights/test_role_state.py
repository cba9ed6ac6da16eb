"""Any box of a role's tensors can be read from whatever boxes were written."""

import builtins
import io
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from mindspeed_rlxf.models.parameters import Head, hf_shapes
from mindspeed_rlxf.weights.boxes import Box, HeldBox, flat_boxes, view_box, whole
from mindspeed_rlxf.weights.folders import open_weights
from mindspeed_rlxf.weights.role_state import RunState, file_of, open_state, write_boxes
from mindspeed_rlxf.weights.state_files import entry_of, has_parts, merge_parts, write_part
from tests.unit.weights.folders_of import architecture_of

MATRIX = torch.arange(7 * 5, dtype=torch.float32).view(7, 5)
VECTOR = torch.arange(6, dtype=torch.bfloat16)


def held(slot: str, name: str, tensor: Tensor, box: Box) -> HeldBox:
    return HeldBox(slot, name, box, tensor[box.slices])


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A matrix cut as two ranks of rows whose slices end inside a row, and a vector in two."""
    cuts = [range(8), range(8, 21), range(21, 35)]
    for rank, flat in enumerate(cuts):
        boxes = [held("exp_avg", "m", MATRIX, box) for box in flat_boxes(flat, (7, 5))]
        if rank < 2:
            boxes += [held("weight", "v", VECTOR, Box((3 * rank,), (3,)))]
        write_boxes(file_of(tmp_path, rank), boxes)
    return tmp_path


def test_a_rank_that_needs_one_file_opens_the_index_and_that_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ranks, matrix = 50, torch.arange(100.0).view(50, 2)
    for rank in range(ranks):
        file, box = file_of(tmp_path, rank), Box((rank, 0), (1, 2))
        rows = write_boxes(file, [held("weight", "m", matrix, box)])
        write_part(tmp_path, rank, [entry_of(tmp_path, file)], {file.name: rows})
    assert has_parts(tmp_path, ranks) and not has_parts(tmp_path, ranks + 1)
    merge_parts(tmp_path, ranks)
    opened: list[str] = []

    def watched(original: Callable[..., Any]) -> Callable[..., Any]:
        def call(path: Any, *args: Any, **keys: Any) -> Any:
            opened.append(Path(path).name)
            return original(path, *args, **keys)

        return call

    for module in (os, io, builtins):
        monkeypatch.setattr(module, "open", watched(module.open))
    wanted = RunState(tmp_path).slot("weight").read("m", Box((7, 0), (1, 2)))
    assert torch.equal(wanted, matrix[7:8])
    assert opened == ["index.json", "state_00007.safetensors"]
    assert sorted(path.name for path in tmp_path.glob("*.json")) == ["index.json"]


@pytest.mark.parametrize("shape", [(3, 4), (12,)])
def test_a_flat_range_is_at_most_three_boxes_that_hold_just_its_numbers(
    shape: tuple[int, ...],
) -> None:
    numbers = torch.arange(12)
    for start in range(12):
        for stop in range(start, 13):
            boxes = list(flat_boxes(range(start, stop), shape))
            assert len(boxes) <= 3
            for found in (
                [numbers.view(shape)[box.slices] for box in boxes],
                [view_box(numbers[start:stop], start, box, shape) for box in boxes],
            ):
                flat = [int(number) for part in found for number in part.flatten()]
                assert flat == list(range(start, stop))


@pytest.mark.parametrize("right", range(1, 6))
@pytest.mark.parametrize("left", range(5))
def test_every_box_is_read_and_nothing_else(
    folder: Path, monkeypatch: pytest.MonkeyPatch, left: int, right: int
) -> None:
    moments = RunState(folder).slot("exp_avg")
    counts: list[int] = []
    preadv = os.preadv
    monkeypatch.setattr(os, "preadv", lambda *a: counts.append(preadv(*a)) or counts[-1])
    for top in range(7):
        for bottom in range(top + 1, 8):
            if left >= right:
                continue
            counts.clear()
            found = moments.read("m", Box((top, left), (bottom - top, right - left)))
            assert found.equal(MATRIX[top:bottom, left:right])
            assert sum(counts) == 4 * (bottom - top) * (right - left)


def test_the_library_reads_the_files_too(folder: Path) -> None:
    pieces = load_file(file_of(folder, 0))
    assert sorted(pieces) == ["exp_avg/m@0,0", "exp_avg/m@1,0", "weight/v@0"]
    assert pieces["exp_avg/m@1,0"].equal(MATRIX[1:2, :3]) and pieces["weight/v@0"].equal(VECTOR[:3])


def test_numbers_that_no_file_has_are_an_error(folder: Path) -> None:
    file_of(folder, 1).unlink()
    moments = RunState(folder).slot("exp_avg")
    assert moments.read("m", Box((0, 0), (1, 5))).equal(MATRIX[:1])
    with pytest.raises(ValueError, match=r"exp_avg of m must be whole, 3 of the 5 numbers"):
        moments.read("m", Box((1, 0), (1, 5)))


def test_a_folder_of_another_model_is_refused(tmp_path: Path) -> None:
    a = architecture_of("llama")
    boxes = [
        HeldBox("weight", name, whole(shape), torch.zeros(shape))
        for name, shape in hf_shapes(a, Head.LANGUAGE_MODEL).items()
    ]
    write_boxes(file_of(tmp_path, 0), boxes)
    assert open_state(tmp_path, a, Head.LANGUAGE_MODEL).slot("weight").shape("lm_head.weight")
    assert open_weights(tmp_path, a).shape("lm_head.weight") == (37, 16)
    fewer = a.model_copy(update={"num_layers": 3})
    with pytest.raises(ValueError, match=r"layers\.3\.input_layernorm\.weight is not in the model"):
        open_state(tmp_path, fewer, Head.LANGUAGE_MODEL)
    wider = a.model_copy(update={"ffn_hidden_size": 32})
    with pytest.raises(ValueError, match=r"gate_proj\.weight is \[24, 16\], the model needs \[32"):
        open_state(tmp_path, wider, Head.LANGUAGE_MODEL)
