"""Random streams of a process can be stored as JSON and restored."""

import json
import random

import numpy as np
import torch

from mindspeed_rlxf.device import load_process_state, process_state


def draw() -> list[float]:
    return [
        random.random(), random.gauss(0, 1), float(np.random.random()),
        float(np.random.standard_normal()), float(torch.rand(())),
    ]  # fmt: skip


def test_streams_continue_from_the_saved_state() -> None:
    random.seed(1)
    np.random.seed(2)
    torch.manual_seed(3)
    draw()  # one number of each pair that gauss makes is kept for later
    state = json.loads(json.dumps(process_state()))
    expected = [draw(), draw()]
    draw()
    assert load_process_state(state)
    assert [draw(), draw()] == expected
