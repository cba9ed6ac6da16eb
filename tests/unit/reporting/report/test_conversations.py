"""A conversation in a report: turns, and between them what was given to the policy."""

from pathlib import Path
from typing import Any

from mindspeed_rlxf.reporting.report.samples import Chosen, cut_for_page


def entry_of(**more: Any) -> dict[str, Any]:
    sample = {
        "iteration": 1, "sample_id": 7, "prompt": "?", "response": "ab<c>d", "score": 1.0,
        "response_ids": [1, 2, 3, 4, 5, 6], **more,
    }  # fmt: skip
    chosen = Chosen([], [sample], 1)
    return cut_for_page(chosen, Path("none"), lambda ids: ["_ab<c>d"[i] for i in ids])[0]


def test_the_texts_of_turns_stand_apart_from_what_was_given() -> None:
    entry = entry_of(turns=[[0, 2], [5, 6]])
    assert entry["c"] == [[True, "ab"], [False, "<c>"], [True, "d"]] and "f" not in entry
    first = entry_of(turns=[[1, 6]], agent_failure="timeout: too late")
    assert first["c"] == [[False, "a"], [True, "b<c>d"]] and first["f"] == "timeout: too late"


def test_other_samples_have_no_turns() -> None:
    assert not {"c", "u", "f"} & entry_of().keys()
