"""Random streams of a process as text, so that their files need no unpickling."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch
from torch import Tensor

from mindspeed_rlxf.device import facade


def to_text(state: Tensor) -> str:
    """State of a generator, [bytes] uint8, as hexadecimal digits."""
    return bytes(state.cpu().numpy().tobytes()).hex()


def from_text(text: str) -> Tensor:
    return torch.frombuffer(bytearray.fromhex(text), dtype=torch.uint8)


def process_state() -> dict[str, Any]:
    """Streams of torch (host and device), numpy and Python, in types that JSON has."""
    _, keys, position, has_gauss, gauss = np.random.get_state(legacy=True)
    version, words, normal = random.getstate()
    library = facade.active_library()
    return {
        "torch": to_text(torch.get_rng_state()),
        "device": None if library is None else to_text(library.get_rng_state()),
        "numpy": [keys.tolist(), position, has_gauss, gauss],  # type: ignore[union-attr]
        "python": [version, list(words), normal],
    }


def load_process_state(state: dict[str, Any]) -> None:
    """Set the streams that `process_state` returned. A device's is skipped on CPU."""
    torch.set_rng_state(from_text(state["torch"]))
    library = facade.active_library()
    if library is not None and state["device"] is not None:
        library.set_rng_state(from_text(state["device"]))
    keys, position, has_gauss, gauss = state["numpy"]
    np.random.set_state(("MT19937", np.array(keys, dtype=np.uint32), position, has_gauss, gauss))
    version, words, normal = state["python"]
    random.setstate((version, tuple(words), normal))
