"""What the recorder writes beside metrics: warnings, illnesses, trackers."""

import datetime
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from mindspeed_rlxf.checkpoint.directory import RunDirectory
from mindspeed_rlxf.cluster.refs import RowsRef
from mindspeed_rlxf.config.load import resolve
from mindspeed_rlxf.reporting.trackers import register_tracker
from mindspeed_rlxf.roles.reports import SampleText, ScoreReport
from mindspeed_rlxf.trainer.recorder import Recorder
from tests.registries import restored_registries
from tests.unit.config.conftest import make_tree, no_cluster
from tests.unit.reporting.test_trackers import Kept

__all__ = ["make_tree", "no_cluster"]

Make = Callable[..., Recorder]


@pytest.fixture
def make(make_tree: Callable[..., Any], tmp_path: Path) -> Iterator[Make]:
    """Make a recorder of a run in a folder; keys of `logging` differ."""
    made: list[Recorder] = []

    def recorder(**logging: Any) -> Recorder:
        for each in made:
            each.close()
        made.clear()
        changes = {f"logging.{name}": value for name, value in logging.items()}
        config = resolve(make_tree({"training.train_iters": 9, **changes}), "test")
        made.append(Recorder(config, RunDirectory(tmp_path), None))
        return made[0]

    yield recorder
    for each in made:
        each.close()


def test_skipped_steps_and_non_finite_scores_are_warned_of(make, capsys):
    recorder = make()
    recorder.warn_of_non_finite(3, {"actor/skipped_steps": 2.0, "critic/skipped_steps": 0.0}, {})
    recorder.warn_of_non_finite(4, {}, {17: float("nan")})
    printed = capsys.readouterr().out
    assert "skipped 2 optimizer steps of the actor in iteration 3" in printed
    assert "critic" not in printed
    assert "the reward returned nan for sample 17 in iteration 4" in printed


def test_illnesses_are_written_down_and_printed_once(make, tmp_path, capsys):
    recorder = make()
    values = [2.0] * 4 + [0.1] * 5 + [3.0] * 3  # ill from 3 to 4, well again, ill from 12
    for i, kl in enumerate(values, 1):
        assert recorder.check_health(i, {"critic/kl": kl}) is None
    lines = [json.loads(line) for line in (tmp_path / "health.jsonl").read_text().splitlines()]
    assert [(line["iteration"], line["event"]) for line in lines] == [
        (3, "began"), (9, "ended"), (12, "began"),
    ]  # fmt: skip
    assert lines[0] == {
        "iteration": 3, "rule": "kl_runaway", "event": "began", "metric": "critic/kl",
        "value": 2.0, "text": "the KL to the reference is 2 nats per token (limit 1)",
        "remedy": "raise algorithm.kl_ctrl.kl_coef, lower actor_rollout.lr", "stops": False,
    }  # fmt: skip
    assert capsys.readouterr().out.count("warning: kl_runaway: the KL") == 1


def test_the_first_illness_of_stop_on_is_returned(make, capsys):
    recorder = make(stop_on=["kl_runaway"])
    for i in (1, 2, 3):
        recorder.write_iteration(i, {"critic/kl": 5.0}, 1.0)
        found = recorder.check_health(i, {"critic/kl": 5.0})
    assert found is not None and (found.rule, found.iteration) == ("kl_runaway", 3)
    capsys.readouterr()
    resumed = make(stop_on=["kl_runaway"])
    note = capsys.readouterr().out
    assert "was stopped after iteration 3 by logging.stop_on (kl_runaway: the KL" in note
    assert resumed.check_health(4, {"critic/kl": 5.0}) is None, "it would never get further"


def test_training_samples_have_their_ground_truth_and_columns(make, tmp_path):
    recorder = make()
    recorder.tokenizer = SimpleNamespace(decode=lambda ids, **_: str(ids))
    actor: Any = SimpleNamespace(sample_texts=lambda *_: [SampleText(7, [1], [2], (0, 0))])
    columns = {"level": 3, "long": "x" * 5000, "date": datetime.date(2026, 1, 2)}
    about = [{"data_source": "sums", "ground_truth": "4", "extra_info": columns}]
    recorder.write_samples(1, actor, RowsRef(()), [ScoreReport([1.0])], about)
    sample = json.loads((tmp_path / "samples.jsonl").read_text())
    assert sample["ground_truth"] == "4" and sample["data_source"] == "sums"
    assert sample["extra_info"]["level"] == 3 and sample["extra_info"]["date"] == "2026-01-02"
    assert len(sample["extra_info"]["long"]) < 2100


@pytest.mark.parametrize(("limit", "kept"), [(0, None), (2, [4, 9]), ("all", [4, 9, 1])])
def test_the_first_samples_are_logged(make, limit, kept):
    log = make(samples=limit).token_log(1, [4, 9, 1])
    assert (log and sorted(log.sample_ids)) == (kept and sorted(kept))


def test_a_tracker_gets_project_mode_and_metrics(make, tmp_path):
    with restored_registries():
        mine = type("Mine", (Kept,), {"runs": [], "got": []})
        register_tracker("mine")(mine)
        recorder = make(trackers=["mine"], tracker_project="sums", tracker_mode="offline")
        validated = {"val/a/score": 0.5, "timing/val": 1.0}
        recorder.write_validation(0, validated, own_line=True)
        recorder.write_iteration(1, {"critic/kl": 0.5}, 1.0)
        make(trackers=["mine"], tracker_mode="auto")  # closes the first one
        make(trackers=["jsonl"])
    first, second = mine.runs
    assert (first.project, first.offline) == ("sums", True)
    assert (second.project, second.offline) == ("mindspeed-rlxf", None)
    assert first.run_id == second.run_id and len(first.run_id) == 16
    assert first.config["training"]["train_iters"] == 9
    assert mine.got == [(0, validated), (1, {"critic/kl": 0.5})]
    assert not (tmp_path / "trackers" / "jsonl").exists()
