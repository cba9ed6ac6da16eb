"""Random streams of a process go through JSON and come back."""

from __future__ import annotations

import json
import random

import numpy as np
import torch

from mindspeed_rlxf.device.random_states import (
    ProcessStreams,
    from_text,
    process_state,
    to_text,
)


def draw() -> list[float]:
    return [
        random.random(),
        random.gauss(0, 1),
        float(np.random.random()),
        float(np.random.standard_normal()),
        float(torch.rand(())),
    ]


def test_streams_go_on_where_they_were_saved() -> None:
    random.seed(1)
    np.random.seed(2)
    torch.manual_seed(3)
    draw()  # one number of each pair that gauss makes is kept for later
    state = json.loads(json.dumps(process_state()))
    expected = [draw(), draw()]
    draw()
    ProcessStreams.from_json(state).load()
    assert [draw(), draw()] == expected


def test_bytes_of_a_generator_are_text() -> None:
    state = torch.tensor([0, 255, 16], dtype=torch.uint8)
    assert to_text(state) == "00ff10"
    assert from_text("00ff10").tolist() == [0, 255, 16]
