"""Save and load the random streams of a process as text, so that nothing has to be unpickled.

Generators check the states that are set only in part. If the position in a state is too large, they
read memory behind it. So every state is checked before it is set.
"""

from __future__ import annotations

import math
import random
import struct
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from mindspeed_rlxf.device import facade

WORDS = 624  # of a Mersenne Twister, 32 bits each
LEFT_AT, NEXT_AT = 8, 16  # places in the bytes of torch's host generator: int32, uint64


def to_text(state: Tensor) -> str:
    """Return a generator's state, [bytes] uint8, as hexadecimal digits."""
    return bytes(state.cpu().numpy().tobytes()).hex()


def from_text(text: str) -> Tensor:
    """Return the state, [bytes] uint8, that `to_text` wrote.

    Raises ValueError for other types than str, empty text, and text that is not hexadecimal.
    """
    if type(text) is not str or not text:
        raise ValueError("the state of a stream must be text")
    try:
        return torch.frombuffer(bytearray.fromhex(text), dtype=torch.uint8)
    except ValueError:
        raise ValueError("the state of a stream must be hexadecimal digits") from None


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
    """Checked random states of a process. device: None if the process computed on a CPU"""

    torch: Tensor
    device: Tensor | None
    numpy: tuple[str, Any, int, int, float]
    python: tuple[Any, ...]

    @classmethod
    def from_json(cls, state: Any) -> ProcessStreams:
        """Check and convert a result of `process_state`.

        Raises ValueError unless `state` is a dict with exactly the keys torch, device, numpy and
        python, whose values are valid states; the device's may be None.
        """
        if type(state) is not dict or state.keys() != {"torch", "device", "numpy", "python"}:
            raise ValueError("the streams of a process must be torch, device, numpy and python")
        host = from_text(state["torch"])
        check_host_state(host)
        device = None if state["device"] is None else from_text(state["device"])
        numpy, python, version = state["numpy"], state["python"], random.getstate()[0]
        fits = _is_list(numpy, 4) and _are_words(numpy[0], WORDS) and _is_position(numpy[1])
        if not (fits and type(numpy[2]) is int and numpy[2] in (0, 1) and _is_finite(numpy[3])):
            raise ValueError(
                f"the stream of numpy must have {WORDS} words of 32 bits, a position in them, 0 or "
                "1, and a finite number"
            )
        # The last word is the position.
        fits = _is_list(python, 3) and type(python[0]) is int and python[0] == version
        fits = fits and _are_words(python[1], WORDS + 1) and _is_position(python[1][-1])
        if not (fits and (python[2] is None or _is_finite(python[2]))):
            raise ValueError(
                f"the stream of Python must have version {version}, {WORDS} words of 32 bits, a "
                "position in them, and a finite number or null"
            )
        numpy_state = ("MT19937", np.array(numpy[0], dtype=np.uint32), *numpy[1:])
        return cls(host, device, numpy_state, (version, tuple(python[1]), python[2]))

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
    """Raise ValueError unless `state` ([bytes] uint8) is one of torch's generator on the host.

    torch itself checks the size, and the range of the next word's position and of the number of
    words left. Here their sum is checked too: it must not exceed WORDS + 1.
    """
    try:
        torch.Generator().set_state(state)
    except RuntimeError as error:
        raise ValueError(f"torch refuses the state of its stream: {error}") from None
    data = state.numpy().tobytes()
    (left,), (position,) = (
        struct.unpack_from(form, data, place) for form, place in (("<i", LEFT_AT), ("<Q", NEXT_AT))
    )
    if position + left > WORDS + 1:
        raise ValueError(
            f"torch must read at most {WORDS} words, not {left} from number {position} on"
        )


def _is_list(value: Any, count: int) -> bool:
    return type(value) is list and len(value) == count


def _are_words(words: Any, count: int) -> bool:
    return _is_list(words, count) and all(type(w) is int and 0 <= w < 1 << 32 for w in words)


def _is_position(position: Any) -> bool:
    return type(position) is int and 0 <= position <= WORDS


def _is_finite(number: Any) -> bool:
    return type(number) is float and math.isfinite(number)
