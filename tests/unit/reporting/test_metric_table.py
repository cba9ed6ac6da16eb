"""The document of metrics is made from the table, and names of metrics are found in it."""

from pathlib import Path

import pytest

from mindspeed_rlxf.config.keys import known_keys
from mindspeed_rlxf.reporting.metric_table import METRICS, find_metric, replace_tables

ROOT = Path(__file__).parents[3]


def test_the_document_is_made_from_the_table():
    text = (ROOT / "docs" / "metrics.md").read_text(encoding="utf-8")
    remedy = "run python -m mindspeed_rlxf.reporting.metric_table docs/metrics.md"
    assert replace_tables(text) == text, remedy


@pytest.mark.parametrize(("name", "row"), [
    ("critic/kl", "critic/kl"), ("critic/kl_coeff", "critic/kl_coeff"),
    ("val/openai/gsm8k/score", "val/<data_source>/score"),
    ("val/openai/gsm8k/pass@8", "val/<data_source>/<metric>"),
    ("train/openai/gsm8k/score", "train/<data_source>/score"),
    ("reward/failed_timeout", "reward/failed_<cause>"), ("reward/accuracy", "reward/<part>"),
    ("memory/update_actor", "memory/<phase>"),
])  # fmt: skip
def test_a_name_is_found_in_the_row_that_says_most(name, row):
    found = find_metric(name)
    assert found is not None and found.name == row


def test_remedies_name_keys_that_exist():
    known = known_keys()
    words = [w.strip(".,;:()") for m in METRICS for w in f"{m.meaning} {m.remedy}".split()]
    named = [w.partition("=")[0] for w in words if w.rpartition(".")[0] in known]
    assert len(named) > 15
    assert [w for w in named if w.rpartition(".")[2] not in known[w.rpartition(".")[0]]] == []
