"""Every advantage estimator is known everywhere that names one."""

from __future__ import annotations

from pathlib import Path

from mindspeed_rlxf.algorithms.estimators import ESTIMATORS
from mindspeed_rlxf.config.enums import AdvEstimator
from mindspeed_rlxf.config.estimators import TRAITS

ROOT = Path(__file__).parents[3]


def test_every_estimator_has_a_function_traits_a_document_and_runs() -> None:
    words = {word.value for word in AdvEstimator}
    assert words == ESTIMATORS.keys() == TRAITS.keys()
    document = (ROOT / "docs" / "algorithms.md").read_text(encoding="utf-8")
    layouts = (ROOT / "tests" / "distributed" / "test_estimators.py").read_text(encoding="utf-8")
    curves = (ROOT / "tests" / "golden" / "runs.py").read_text(encoding="utf-8")
    for word in AdvEstimator:
        assert f"| `{word.value}` |" in document, word
        if not TRAITS[word.value].needs_critic:  # GAE runs in every other test
            assert f"AdvEstimator.{word.name}," in layouts, word
            assert f'"{word.value}"' in curves, word
