"""The timeline is complete JSON after each iteration, and does not grow."""

import json
from pathlib import Path
from typing import Any

from mindspeed_rlxf.reporting.timeline import Span, Timeline


def spans(iteration: int) -> list[Span]:
    at = 1000.0 + iteration
    return [
        Span("iteration", "driver", 0, at, 0.75),
        *(Span("actor.update", "main", rank, at + 0.25, 0.5) for rank in range(2)),
    ]


def events(file: Path, kind: str = "X") -> list[dict[str, Any]]:
    return [event for event in json.loads(file.read_text()) if event["ph"] == kind]


def test_a_rank_is_a_thread_of_its_pool_and_times_are_microseconds(tmp_path):
    Timeline(tmp_path / "timeline").write(7, spans(7))
    (file,) = (tmp_path / "timeline").iterdir()
    assert file.name == "iterations_0000001.json"
    names = {(e["pid"], e["tid"], e["name"]): e["args"]["name"] for e in events(file, "M")}
    assert names == {
        (0, 0, "process_name"): "driver", (0, 0, "thread_name"): "rank 0",
        (1, 64, "process_name"): "main", (1, 64, "thread_name"): "actor rank 0",
        (1, 65, "process_name"): "main", (1, 65, "thread_name"): "actor rank 1",
    }  # fmt: skip
    whole, first, second = events(file)
    assert (whole["ts"], whole["dur"]) == (1_007_000_000, 750_000)
    assert second == {
        "name": "actor.update", "cat": "actor", "ph": "X", "ts": 1_007_250_000, "dur": 500_000,
        "pid": 1, "tid": 65, "args": {"iteration": 7, "rank": 1},
    }  # fmt: skip
    assert first == {**second, "tid": 64, "args": {"iteration": 7, "rank": 0}}


def test_roles_of_a_pool_have_lanes_of_their_own_and_waits_are_told_apart(tmp_path):
    work = [Span(f"{role}.step", "main", 1, 1.0, 1.0) for role in ("actor", "critic")]
    wait = Span("critic.inputs", "main", 1, 0.5, 0.5, "wait")
    Timeline(tmp_path).write(1, [*work, wait])
    (file,) = tmp_path.iterdir()
    actor, critic, waited = events(file)
    assert actor["tid"] != critic["tid"] == waited["tid"] and actor["pid"] == critic["pid"]
    assert [event["cat"] for event in events(file)] == ["actor", "critic", "wait"]


def test_a_hundred_iterations_share_a_file_and_five_files_are_kept(tmp_path):
    timeline = Timeline(tmp_path)
    for iteration in range(1, 702, 50):
        timeline.write(iteration, spans(iteration))
    files = sorted(tmp_path.iterdir())
    assert [file.name for file in files] == [
        f"iterations_{n:07d}.json" for n in range(301, 702, 100)
    ]
    assert [[e["args"]["iteration"] for e in events(file)[::3]] for file in files[:2]] == [
        [301, 351], [401, 451],
    ]  # fmt: skip
    assert events(files[1], "M"), "each file has the names"
