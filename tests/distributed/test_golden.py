"""Short runs of every estimator repeat their recorded curves.

Exactly on a machine with the recorded fingerprint, within 1e-4 elsewhere. After a change that is
meant to change them, record them again: `python -m tests.golden.record` prints what has changed.
"""

from pathlib import Path
from typing import Any

import pytest

from mindspeed_rlxf.config.schema import ValidationConfig
from mindspeed_rlxf.data.agent_record import AgentFailure, AgentRecord
from mindspeed_rlxf.reporting.metric_table import METRICS, find_metric
from mindspeed_rlxf.roles.reports import (
    ExperienceReport,
    FailedSample,
    GenerateReport,
    LogProbReport,
    ScoreReport,
    Summary,
    UpdateReport,
)
from mindspeed_rlxf.trainer import metrics
from mindspeed_rlxf.trainer.metrics import phase_metrics
from mindspeed_rlxf.trainer.validation import Scored, measure
from tests.golden.runs import SETTINGS, WRITTEN, fingerprint, read_trace, run
from tests.unit.trainer.test_rank_metrics import pending

# Each differs by one formula from a run of the short tests.
LONG = ("gae_full_kl", "dr_grpo", "reinforce_plus_plus_baseline", "online_ipo")


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[pytest.mark.long] * (n in LONG)) for n in SETTINGS]
)
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


def of_other_runs() -> set[str]:
    """Names that the runs above have no reason to write, from the functions that make them."""
    gap = Summary(1, 0.0, 0.0, 0.0)
    failure = FailedSample(1, "timeout", "")
    skipped = UpdateReport([{"grad_norm": 1.0, "skipped_steps": 1.0}], 1.0)
    led = AgentRecord("mine", [(0, 1)], [0.0], failure=AgentFailure("timeout", ""))
    generated = GenerateReport([1], [1], [True], 0, 0, 0, 0.0, "", [0], [0.0], [led])
    experience = ExperienceReport([], gap, gap, gap, None, None, None, 1, rejected=gap)
    found = {
        **metrics.log_prob_metrics([LogProbReport(gap, gap)]),
        **metrics.score_metrics(ScoreReport([0.0], [{}], [failure])),
        **metrics.update_metrics("actor", skipped),
        **metrics.update_metrics("critic", skipped),
        **metrics.throughput_metrics([], 1.0, 1.0, 1, 1.0),
        **phase_metrics({"gen": [pending("main", 1.0, 2.0)]}),
        **measure([[Scored(1.0, 3)]], ["a"], ValidationConfig()),
        **metrics.experience_metrics([experience], 0.0),
        **metrics.staleness_metrics([generated], 1),
        **metrics.agent_metrics([generated]),
        **metrics.wait_metrics(1.0, 2.0),
        **metrics.idle_metrics({}, {"main": 2}, 1.0, {"main": (1, 1)}),
    }
    of_validations = {"timing/val", "val/agent_failures"}
    return {*found, *of_validations, "timing/save_wait"}  # the last one of a point


def test_the_table_has_every_metric_of_these_runs_and_no_other() -> None:
    """Comes after the runs above, of which it needs all."""
    if not {"actor/dpo_loss", "rollout/gen_batches", "critic/vf_loss"} <= WRITTEN:
        pytest.skip("the runs above did not run in this process")
    written = WRITTEN | of_other_runs()
    assert sorted(name for name in written if find_metric(name) is None) == []
    rows = {row.name for name in written if (row := find_metric(name))}
    assert sorted({metric.name for metric in METRICS} - rows) == []
