"""Save and load the random streams of a process as text, so that nothing has to be unpickled."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from mindspeed_rlxf.device import facade


def to_text(state: Tensor) -> str:
    """Return a generator's state, [bytes] uint8, as hexadecimal digits."""
    return bytes(state.cpu().numpy().tobytes()).hex()


def from_text(text: str) -> Tensor:
    """Return the state, [bytes] uint8, that `to_text` wrote; raise ValueError for other text."""
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


@dataclass(frozen=True)
class ProcessStreams:
    """Random states of a process. device: None if the process computed on a CPU"""

    torch: Tensor
    device: Tensor | None
    numpy: tuple[str, Any, int, int, float]
    python: tuple[Any, ...]

    @classmethod
    def from_json(cls, state: Any) -> ProcessStreams:
        """Convert a result of `process_state`; raise ValueError for anything else."""
        try:
            host, device = from_text(state["torch"]), state["device"]
            check_host_state(host)
            device = None if device is None else from_text(device)
            words, *place = state["numpy"]
            numpy_state = ("MT19937", np.array(words, dtype=np.uint32), *place)
            np.random.RandomState().set_state(numpy_state)
            version, words, normal = state["python"]
            python = (version, tuple(words), normal)
            random.Random().setstate(python)
        except (LookupError, TypeError, OverflowError, RuntimeError) as error:
            raise ValueError(
                f"the streams of a process must be as it saved them: {error}"
            ) from None
        return cls(host, device, numpy_state, python)

    @property
    def is_of_this_device(self) -> bool:
        """Return whether `device` was saved on the kind of device that this process uses.

        None fits only a CPU process; other states fit if they have the size of the current one.
        """
        library = facade.active_library()
        if library is None or self.device is None:
            return library is self.device
        return bool(library.get_rng_state().numel() == self.device.numel())

    def load(self) -> None:
        """Set the random states of this process's torch (host, device), numpy and Python.

        The device's stays if `device` is None. Raises ValueError if the device refuses its state;
        then no state is changed.
        """
        library = facade.active_library()
        if self.device is not None:
            try:
                library.set_rng_state(self.device)
            except RuntimeError as error:
                raise ValueError(f"the device refuses the state of its stream: {error}") from None
        torch.set_rng_state(self.torch)
        np.random.set_state(self.numpy)
        random.setstate(self.python)


def check_host_state(state: Tensor) -> None:
    """Raise ValueError unless torch's generator on the host takes `state` ([bytes] uint8)."""
    try:
        torch.Generator().set_state(state)
    except RuntimeError as error:
        raise ValueError(f"torch refuses the state of its stream: {error}") from None
