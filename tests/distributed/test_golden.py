"""Short runs of every estimator repeat their recorded curves.

Exactly on a machine with the recorded fingerprint, within 1e-4 elsewhere. A change that moves them
on purpose records them anew: `python -m tests.golden.record`, which prints what moved.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.golden.runs import SETTINGS, fingerprint, read_trace, run


@pytest.mark.parametrize("name", SETTINGS)
def test_run_repeats_its_recorded_curves(warm_runtime: Any, tmp_path: Path, name: str) -> None:
    recorded_on, expected = read_trace(name)
    found = run(name, tmp_path / "run", warm_runtime)
    assert max(expected["critic/score/mean"]) > min(expected["critic/score/mean"])
    if recorded_on == fingerprint():
        assert found == expected
        return
    assert found.keys() == expected.keys()
    for key, values in expected.items():
        assert found[key] == pytest.approx(values, rel=1e-4, abs=1e-4), key
