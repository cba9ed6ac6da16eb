"""Prompts in a temporary file: what was added comes back, and memory stays as it is."""

import tracemalloc

import numpy as np
import pytest

from mindspeed_rlxf.data.prompt_store import Labels, PromptStore


def filled(count: int, parts: int = 1) -> PromptStore:
    store = PromptStore()
    for place in range(count):
        labels = Labels(f"truth {place}", f"source {place % 2}", {"place": [place, {"ö": None}]})
        store.add(f"text {place} \ud800", range(place % 5 + 1), labels)
        if (place + 1) % (count // parts) == 0:
            store.end_file()
    return store


def test_prompts_come_back_in_order() -> None:
    store = filled(10)
    assert len(store) == 10 and [p.index for p in store] == list(range(10))
    prompt = store[7]
    assert prompt.text == "text 7 \ud800" and prompt.token_ids.tolist() == [0, 1, 2]
    assert prompt.token_ids.dtype == np.int64
    assert (prompt.ground_truth, prompt.data_source) == ("truth 7", "source 1")
    assert prompt.extra_info == {"place": [7, {"ö": None}]}
    assert [p.index for p in store[3:8:2]] == [3, 5, 7] and store[-1].index == 9
    assert store[:0] == [] and len(store[:None]) == 10
    with pytest.raises(IndexError):
        store[10]


def test_memory_does_not_grow_with_the_number_of_prompts() -> None:
    filled(100)  # takes what the first one alone needs
    used = []
    for count in (1_000, 4_000):
        tracemalloc.start()
        store = filled(count)
        for place in range(0, count, 97):
            store[place]
        used.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
        del store
    assert used[1] < used[0] + 16 * 3_000  # bytes for each further prompt: its position
