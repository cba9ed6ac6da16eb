"""A rehearsal says which rank took another path than MindSpeed's."""

from __future__ import annotations

import json
from pathlib import Path

from tests.npu_rehearsal.cases import OPERATORS
from tests.npu_rehearsal.run import operators


def test_a_rank_that_never_called_an_operator_is_named(tmp_path: Path) -> None:
    every = dict.fromkeys(OPERATORS, 1)
    for rank, called in enumerate([every, every | {"npu_swiglu": 0}, {}]):
        (tmp_path / f"operators.{rank}.json").write_text(json.dumps(called))
    assert operators(tmp_path, 1) == ([every], [])
    _, uncalled = operators(tmp_path, 3)
    assert len(uncalled) == 1 + len(OPERATORS)
    assert uncalled[0].startswith("rank 1 never called npu_swiglu")
    assert {what.split(" never")[0] for what in uncalled[1:]} == {"rank 2"}
