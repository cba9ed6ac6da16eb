"""Any chunk of a role's tensors can be read from whatever chunks were written."""

from itertools import product
from pathlib import Path

import pytest
import torch
from torch import Tensor

from mindspeed_rlxf.models.parameters import Head, hf_shapes
from mindspeed_rlxf.weights import role_state
from mindspeed_rlxf.weights.chunks import Chunk, HeldChunk, flat_chunks, view_chunk, whole
from mindspeed_rlxf.weights.folders import open_weights
from mindspeed_rlxf.weights.role_state import file_of, open_state, read_states, write_chunks
from mindspeed_rlxf.weights.state_files import (
    entry_of,
    has_rank_indexes,
    merge_rank_indexes,
    write_rank_index,
)
from tests.unit.weights.folders_of import architecture_of

MATRIX = torch.arange(7 * 5, dtype=torch.float32).view(7, 5)
VECTOR = torch.arange(6, dtype=torch.bfloat16)


def held(state_name: str, name: str, tensor: Tensor, chunk: Chunk) -> HeldChunk:
    return HeldChunk(state_name, name, chunk, tensor[chunk.slices])


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A matrix cut as two ranks of rows whose slices end inside a row, and a vector in two."""
    cuts = [range(8), range(8, 21), range(21, 35)]
    for rank, flat in enumerate(cuts):
        chunks = [held("exp_avg", "m", MATRIX, chunk) for chunk in flat_chunks(flat, (7, 5))]
        if rank < 2:
            chunks += [held("weight", "v", VECTOR, Chunk((3 * rank,), (3,)))]
        write_chunks(file_of(tmp_path, rank), chunks)
    return tmp_path


def test_a_rank_opens_only_the_file_that_it_needs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ranks, matrix = 50, torch.arange(100.0).view(50, 2)
    for rank in range(ranks):
        file, chunk = file_of(tmp_path, rank), Chunk((rank, 0), (1, 2))
        rows = write_chunks(file, [held("weight", "m", matrix, chunk)])
        write_rank_index(tmp_path, rank, [entry_of(tmp_path, file)], {file.name: rows})
    assert has_rank_indexes(tmp_path, ranks) and not has_rank_indexes(tmp_path, ranks + 1)
    merge_rank_indexes(tmp_path, ranks)
    opened: list[Path] = []
    original = role_state.open_safetensors
    monkeypatch.setattr(
        role_state, "open_safetensors", lambda path: opened.append(path) or original(path)
    )
    wanted = read_states(tmp_path)["weight"]["m"].read(Chunk((7, 0), (1, 2)))
    assert torch.equal(wanted, matrix[7:8]) and opened == [file_of(tmp_path, 7)]
    assert sorted(path.name for path in tmp_path.glob("*.json")) == ["index.json"]


@pytest.mark.parametrize("shape", [(3, 4), (12,)])
def test_a_flat_range_is_at_most_three_boxes_that_hold_just_its_numbers(
    shape: tuple[int, ...],
) -> None:
    numbers = torch.arange(12)
    for start in range(12):
        for stop in range(start, 13):
            chunks = list(flat_chunks(range(start, stop), shape))
            assert len(chunks) <= 3
            for found in (
                [numbers.view(shape)[chunk.slices] for chunk in chunks],
                [view_chunk(numbers[start:stop], start, chunk, shape) for chunk in chunks],
            ):
                flat = [int(number) for part in found for number in part.flatten()]
                assert flat == list(range(start, stop))


def test_every_chunk_is_read(folder: Path) -> None:
    moments = read_states(folder)["exp_avg"]["m"]
    for top, left in product(range(7), range(5)):
        for bottom, right in product(range(top + 1, 8), range(left + 1, 6)):
            found = moments.read(Chunk((top, left), (bottom - top, right - left)))
            assert found.equal(MATRIX[top:bottom, left:right])


def test_numbers_that_no_file_has_are_an_error(folder: Path) -> None:
    file_of(folder, 1).unlink()
    moments = read_states(folder)["exp_avg"]
    assert moments["m"].read(Chunk((0, 0), (1, 5))).equal(MATRIX[:1])
    with pytest.raises(ValueError, match=r"exp_avg of m must be complete, 3 of 5 elements"):
        moments["m"].read(Chunk((1, 0), (1, 5)))


def test_a_folder_of_another_model_is_refused(tmp_path: Path) -> None:
    a = architecture_of("llama")
    chunks = [
        HeldChunk("weight", name, whole(shape), torch.zeros(shape))
        for name, shape in hf_shapes(a, Head.LANGUAGE_MODEL).items()
    ]
    write_chunks(file_of(tmp_path, 0), chunks)
    assert open_state(tmp_path, a, hf_shapes(a, Head.LANGUAGE_MODEL))("weight")["lm_head.weight"]
    assert open_weights(tmp_path, a)["lm_head.weight"].shape == (37, 16)
    fewer = a.model_copy(update={"num_layers": 3})
    with pytest.raises(ValueError, match=r"layers\.3\.input_layernorm\.weight is not in the model"):
        open_state(tmp_path, fewer, hf_shapes(fewer, Head.LANGUAGE_MODEL))
    wider = a.model_copy(update={"ffn_hidden_size": 32})
    with pytest.raises(ValueError, match=r"gate_proj\.weight is \[24, 16\], the model needs \[32"):
        open_state(tmp_path, wider, hf_shapes(wider, Head.LANGUAGE_MODEL))
