"""Save and load the random streams of a process as text, so that nothing has to be unpickled."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch
from torch import Tensor

from mindspeed_rlxf.device import facade


def to_text(state: Tensor) -> str:
    """Return a generator's state, [bytes] uint8, as hexadecimal digits."""
    return bytes(state.cpu().numpy().tobytes()).hex()


def from_text(text: str) -> Tensor:
    """Return the state, [bytes] uint8, that `to_text` wrote."""
    return torch.frombuffer(bytearray.fromhex(text), dtype=torch.uint8)


def process_state() -> dict[str, Any]:
    """Return the random states of torch (host, device), numpy and Python, as values for JSON.

    The keys are torch, device (None on CPU), numpy and python.
    """
    _, keys, position, has_gauss, gauss = np.random.get_state(legacy=True)
    version, words, normal = random.getstate()
    library = facade.active_library()
    return {
        "torch": to_text(torch.get_rng_state()),
        "device": None if library is None else to_text(library.get_rng_state()),
        "numpy": [keys.tolist(), position, has_gauss, gauss],  # type: ignore[union-attr]
        "python": [version, list(words), normal],
    }


def load_process_state(state: dict[str, Any]) -> bool:
    """Set the random states that `process_state` returned.

    Changes nothing and returns False if they are of another kind of device: None is of a CPU, other
    states of a device whose state has the same size.
    """
    library = facade.active_library()
    device = None if state["device"] is None else from_text(state["device"])
    if library is None or device is None:
        if library is not device:
            return False
    elif library.get_rng_state().numel() != device.numel():
        return False
    else:
        library.set_rng_state(device)
    torch.set_rng_state(from_text(state["torch"]))
    words, *place = state["numpy"]
    np.random.set_state(("MT19937", np.array(words, dtype=np.uint32), *place))
    version, words, normal = state["python"]
    random.setstate((version, tuple(words), normal))
    return True
