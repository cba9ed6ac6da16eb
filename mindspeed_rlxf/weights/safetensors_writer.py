"""Writing safetensors files tensor by tensor; the library wants all tensors of a file at once."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

import torch

from mindspeed_rlxf.weights.torch_file_writer import PlannedTensor, pieces, tensor_bytes

DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
}
ALIGNMENT = 8  # of the data, bytes


def write_safetensors(
    path: Path, tensors: dict[str, PlannedTensor], wrote: Callable[[int], None]
) -> None:
    """Write the file and have it on the disk on return. wrote: told the bytes of each tensor."""
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, planned in tensors.items():
        start, end = end, end + planned.num_bytes
        header[name] = {
            "dtype": DTYPES[planned.dtype],
            "shape": list(planned.shape),
            "data_offsets": [start, end],
        }
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % ALIGNMENT)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for planned in tensors.values():
            tensor = planned.make()
            assert tensor.shape == planned.shape and tensor.dtype == planned.dtype, "as planned"
            for piece in pieces(tensor_bytes(tensor)):
                file.write(piece)
            wrote(planned.num_bytes)
        file.flush()
        os.fsync(file.fileno())
