"""Random streams of a process as text: no file of them has to be unpickled."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch
from torch import Tensor

from mindspeed_rlxf.device import facade


def to_text(state: Tensor) -> str:
    """state: bytes of a generator, uint8."""
    return bytes(state.cpu().numpy().tobytes()).hex()


def from_text(text: str) -> Tensor:
    return torch.frombuffer(bytearray.fromhex(text), dtype=torch.uint8)


def process_state() -> dict[str, Any]:
    """Streams of torch (host and device), numpy and Python, as JSON takes them."""
    _, keys, position, has_gauss, gauss = np.random.get_state(legacy=True)
    version, words, normal = random.getstate()
    device_state = facade.random_state()
    return {
        "torch": to_text(torch.get_rng_state()),
        "device": None if device_state is None else to_text(device_state),
        "numpy": [keys.tolist(), position, has_gauss, gauss],  # type: ignore[union-attr]
        "python": [version, list(words), normal],
    }


def load_process_state(state: dict[str, Any]) -> None:
    torch.set_rng_state(from_text(state["torch"]))
    if state["device"] is not None:
        facade.set_random_state(from_text(state["device"]))
    keys, position, has_gauss, gauss = state["numpy"]
    np.random.set_state(("MT19937", np.array(keys, dtype=np.uint32), position, has_gauss, gauss))
    version, words, normal = state["python"]
    random.setstate((version, tuple(words), normal))
