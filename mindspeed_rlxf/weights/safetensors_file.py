"""Safetensors files: written tensor by tensor, and their headers read with bounds.

The library wants all tensors of a file at once, and reads no header without mapping the file.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import torch

from mindspeed_rlxf.files.safe import new_file
from mindspeed_rlxf.weights.planned import PlannedTensor, Wrote
from mindspeed_rlxf.weights.regular import open_regular, parse_json

DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
}
OF_NAME = {name: dtype for dtype, name in DTYPES.items()}
ALIGNMENT = 8  # of the data, bytes
MAX_HEADER_BYTES = 32 << 20  # 300,000 tensors
METADATA = "__metadata__"


def write_safetensors(path: Path, tensors: dict[str, PlannedTensor], wrote: Wrote) -> None:
    """Write the file in place of what has the name, and have it on the disk on return."""
    header: dict[str, object] = {METADATA: {"format": "pt"}}
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
    with new_file(path) as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for planned in tensors.values():
            file.writelines(planned.parts())
            wrote(planned.num_bytes)
        file.flush()
        os.fsync(file.fileno())


def aligned(tensors: dict[str, PlannedTensor]) -> dict[str, PlannedTensor]:
    """The tensors with wide dtypes first, as the library writes them, so that all are aligned."""
    return dict(sorted(tensors.items(), key=lambda item: -item[1].dtype.itemsize))


def read_header(file: Path) -> tuple[dict[str, Any], int, int]:
    """What the header says of each tensor by name, and where the data start and end, bytes.

    Errors: OSError, ValueError
    """
    with open_regular(file) as stream:
        length = int.from_bytes(stream.read(8), "little")
        if length > MAX_HEADER_BYTES:
            raise ValueError(f"its header has {length} bytes")
        text = stream.read(length)
        if len(text) != length:
            raise ValueError("its header is cut short")
        header = parse_json(text, file)
        header.pop(METADATA, None)
        return header, 8 + length, stream.seek(0, os.SEEK_END)
