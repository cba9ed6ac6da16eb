"""A rehearsal names each rank that did not call an operator or restore a random stream."""

from __future__ import annotations

import json
import zlib
from pathlib import Path

from tests.npu_rehearsal import ray_run
from tests.npu_rehearsal.cases import OPERATORS
from tests.npu_rehearsal.run import read_operators


def test_a_rank_that_never_called_an_operator_is_named(tmp_path: Path) -> None:
    every = dict.fromkeys(OPERATORS, 1)
    for rank, called in enumerate([every, every | {"npu_swiglu": 0}, {}]):
        (tmp_path / f"operators.{rank}.json").write_text(json.dumps(called))
    assert read_operators(tmp_path, 1) == ([every], [])
    _, uncalled = read_operators(tmp_path, 3)
    assert len(uncalled) == 1 + len(OPERATORS)
    assert uncalled[0].startswith("rank 1 never called npu_swiglu")
    assert {what.split(" never")[0] for what in uncalled[1:]} == {"rank 2"}


def test_a_random_stream_that_no_worker_restored_is_named(tmp_path: Path) -> None:
    for name, states in (("iter_0000002", (b"a", b"b")), ("iter_0000005", (b"c", b"d"))):
        for rank, state in enumerate(states):
            file = tmp_path / "checkpoints" / name / "actor" / f"rank_{rank:05d}.json"
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(json.dumps({"process": {"device": state.hex()}}))
    first, second, other = (f"random state {zlib.crc32(state):08x}" for state in (b"a", b"b", b"d"))
    assert ray_run.find_unrestored_states(tmp_path, [first, second, "npu_swiglu"]) == []
    lost = ray_run.find_unrestored_states(tmp_path, [first, other])
    assert lost == [f"{second} was saved and not restored"]
