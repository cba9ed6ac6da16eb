"""The report reads a run whatever its state, answers from its numbers, and stays small."""

import base64
import gzip
import itertools
import json
import re
from pathlib import Path
from typing import Any

import pytest

from mindspeed_rlxf.checkpoint import lock
from mindspeed_rlxf.checkpoint.report_file import find_state, write_report
from mindspeed_rlxf.cli.report import main
from mindspeed_rlxf.config.problems import printable
from mindspeed_rlxf.reporting.report.judgement import judge
from mindspeed_rlxf.reporting.report.records import Iteration, make_curves, read_iterations, thin
from mindspeed_rlxf.reporting.report.samples import Chosen, choose_samples, cut_for_page
from tests.report_run import EVIL, HAN, damage, metrics_of, sample_of, write_run


def split(ids: list[int]) -> list[str]:
    """Stands in for a tokenizer of single letters."""
    return [chr(65 + i % 26) for i in ids]


def parts(file: Path) -> dict[str, Any]:
    """What the page of a report reads."""
    text = file.read_text(encoding="utf-8")
    found = re.findall(r'<script type="text/plain" id="data-(\w+)">([^<]*)</script>', text)
    return {name: json.loads(gzip.decompress(base64.b64decode(blob))) for name, blob in found}


def report_of(run: Path, *more: Path, samples: int = 2000) -> dict[str, Any]:
    file = run / "report.html"
    write_report([run, *more], file, samples)
    return parts(file)


def iterations(scores: list[float], name: str = "critic/score/mean") -> list[Iteration]:
    return [Iteration(i, {name: score}, 1.0) for i, score in enumerate(scores, 1)]


def test_a_report_of_a_whole_run_answers_and_holds_its_samples(tmp_path):
    run = write_run(tmp_path / "run")
    found = report_of(run)
    (main_part,), (samples,) = found["main"]["runs"], found["samples"]
    assert (main_part["name"], main_part["state"], main_part["done"]) == ("run", "stopped", 40)
    learned, time_, kl = main_part["answers"]
    assert (learned["short"], learned["level"]) == ("yes", "good")
    assert "0.3 before training" in learned["text"], "metrics_of(0) of the validation at 0"
    assert time_["short"].startswith(("actor, ", "critic, ")), "two phases of seven each"
    last = metrics_of(40)["critic/kl"]
    first = metrics_of(1)["critic/kl"]
    assert f"{first:.3g} in the first, {last:.3g} in the last" in kl["text"]
    assert kl["short"].endswith(", healthy") and kl["text"].endswith("Healthy: at most 1.")
    assert "rollout 13%" in time_["text"], "7 phases of 0.25 s in iterations of 2 s"
    assert main_part["subject"] == "PPO, model tiny"
    assert samples["seen"] == len(samples["samples"]) == 40 * 4 + 5 * 3
    assert found["main"]["runs"][0]["config"]["actor_rollout.lr"] == 0.5
    assert main_part["about"]["critic/kl"]["unit"] == "nats per token"


def test_the_report_of_a_killed_run_has_all_whole_lines_and_names_missing_numbers(tmp_path):
    run = write_run(tmp_path / "run")
    damage(run)
    found = report_of(run)
    (main_part,) = found["main"]["runs"]
    assert main_part["done"] == 41 and len(found["samples"][0]["samples"]) == 175
    assert main_part["curves"]["critic/score/mean"]["y"][-1] is None
    texts = [each["text"] for each in main_part["problems"]]
    assert "critic/score/mean is not finite" in texts


def test_texts_of_a_run_are_escaped_in_the_report(tmp_path):
    run = write_run(tmp_path / EVIL.split("\x1b")[0].replace("/", "|"))
    text = run.joinpath("report.html")
    found = report_of(run)
    raw = text.read_text(encoding="utf-8")
    title = raw.split("<title>")[1].split("</title>")[0]
    assert title.startswith("&lt;|script&gt;&lt;img") and title.endswith("\\u202egnp.exe")
    assert raw.count("</script>") == 3, "two of data, one of the script"
    shown = {sample["r"] for sample in found["samples"][0]["samples"]}
    evil = next(each for each in shown if "onerror" in each)
    assert evil.endswith("\\u202egnp.exe\\u001b[31m\\u0000 \ud800") and HAN in shown
    assert "connect-src 'none'" in raw and "default-src 'none'" in raw


def test_a_sample_shows_its_ground_truth_and_the_columns_of_its_row(tmp_path):
    """Samples of older runs have neither."""
    more = {"ground_truth": "7", "extra_info": {"level": 3, EVIL: [1, 2]}}
    samples = [sample_of(1, 0, "a", **more).record(1), sample_of(1, 1, "b").record(1)]
    new, old = cut_for_page(Chosen(samples, [], 2), tmp_path)
    assert new["gt"] == "7" and new["x"] == {"level": "3", printable(EVIL): "[1, 2]"}
    assert "gt" not in old and "x" not in old


def test_samples_are_chosen_evenly(tmp_path):
    run = write_run(tmp_path / "run", 60, 6)
    chosen = choose_samples(run, 100)
    assert len(chosen.training) + len(chosen.validation) <= 100 and chosen.seen == 60 * 6 + 5 * 3
    numbers = [sample["iteration"] for sample in chosen.training]
    gaps = [b - a for a, b in itertools.pairwise(numbers)]
    assert numbers[0] == 1 and numbers[-1] >= 58 and max(gaps) <= 2
    followed = {s["prompt_id"]: 0 for s in chosen.validation}
    for sample in chosen.validation:
        followed[sample["prompt_id"]] += 1
    assert set(followed.values()) == {5}, "a prompt that is kept has all its validations"


def test_tokens_have_the_numbers_of_their_own_sample(tmp_path):
    run = write_run(tmp_path / "run", 3, 2)
    write_report([run], run / "report.html", tokenizer=None)
    assert "num" not in parts(run / "report.html")["samples"][0]["samples"][0], "no tokenizer"
    cut = cut_for_page(choose_samples(run), run, split)
    lines = (run / "samples_tokens" / "rank_00000.jsonl").read_text().splitlines()
    by_id = {line["sample_id"]: line for line in map(json.loads, lines)}
    trained = [sample for sample in cut if sample["k"] == "training"]
    assert len(trained) == 6
    for sample in trained:
        assert sample["num"]["kl"] == pytest.approx(by_id[sample["id"]]["kl"], rel=5e-3)
        assert len(sample["t"]) == sample["n"] == len(sample["num"]["value"])


def test_thinning_keeps_the_ends_and_every_extreme():
    points = [(i, float(i % 7)) for i in range(10_000)]
    points[4321], points[8765] = (4321, 99.0), (8765, -99.0)
    kept = thin(points, 500)
    assert len(kept) <= 500 and (kept[0], kept[-1]) == (points[0], points[-1])
    assert {(4321, 99.0), (8765, -99.0)} <= set(kept)
    assert thin(points[:400], 500) == points[:400]


@pytest.mark.parametrize(("scores", "short"), [
    ([0.1] * 20 + [0.9] * 20, "yes"), ([0.9] * 20 + [0.1] * 20, "no, it got worse"),
    ([0.5, 0.7] * 20, "no clear change"), ([0.5], "too early to say"),
])  # fmt: skip
def test_the_answer_to_learning_follows_both_ends(scores, short):
    assert judge(iterations(scores), {})["answers"][0]["short"] == short


def test_the_answer_follows_validation_where_it_disagrees_with_training():
    def metrics(i: int) -> dict[str, float | None]:
        return {"critic/score/mean": i / 40, "val/a/score": 0.9 - i / 80}

    both = [Iteration(i, metrics(i), 1.0) for i in range(40)]
    assert judge(both, {})["answers"][0]["short"] == "no, it got worse"


def test_a_health_finding_names_the_iteration_in_which_it_ended():
    kl = [0.1] * 5 + [3.0] * 5 + [0.1] * 8
    found = judge(iterations(kl * 2, "critic/kl"), {})["problems"]
    ends = [re.findall(r"ended in iteration (\d+)", each["text"])[0] for each in found]
    assert [(each["level"], each["iteration"]) for each in found] == [("watch", 8), ("watch", 26)]
    assert ends == ["15", "33"], "five iterations after the last over the limit"
    (found,) = judge(iterations(kl[:10], "critic/kl"), {})["problems"][:1]
    assert found["level"] == "bad" and "algorithm.kl_ctrl.kl_coef" in found["remedy"]


def test_a_line_that_was_written_twice_counts_once(tmp_path):
    lines = [{"iteration": 5, "metrics": {"a": i, "b": None}, "time_s": i} for i in (1, 2)]
    text = "".join(json.dumps(line) + "\n" for line in lines)
    (tmp_path / "metrics.jsonl").write_text(text + '[1]\n{"iteration": "x"}\n')
    (found,) = read_iterations(tmp_path)
    assert (found.metrics, found.time_s) == ({"a": 2.0, "b": None}, 2.0)
    assert make_curves([found])["b"] == {"x": [5], "y": [None]}


def test_runs_are_laid_over_each_other_by_the_parts_of_their_paths(tmp_path):
    first, other = write_run(tmp_path / "a" / "run", 8), write_run(tmp_path / "b" / "run", 8, lr=1)
    runs = report_of(first, other)["main"]["runs"]
    assert [run["name"] for run in runs] == ["a/run", "b/run"]
    assert [run["config"]["actor_rollout.lr"] for run in runs] == [0.5, 1]


def test_the_state_of_a_run_is_seen_from_its_folder(tmp_path):
    run = write_run(tmp_path / "run", 3)
    checkpoints = run / "checkpoints"
    checkpoints.mkdir()
    (checkpoints / "exported_iteration.txt").write_text("3\n")
    assert find_state(run) == "finished"
    (run / "failure.json").write_text(json.dumps({"message": "lost", "iteration": 3}))
    assert find_state(run) == "failed"
    assert report_of(run)["main"]["runs"][0]["problems"][0]["text"] == "failed: lost"
    (run / lock.LOCK).write_text('{"machine": "another"}')
    assert find_state(run) == "running"
    (run / lock.LOCK).unlink()
    (run / lock.LOCK).mkdir()  # cannot be opened, as the private lock of another user
    assert find_state(run) == "failed"


def test_a_long_run_stays_under_ten_megabytes(tmp_path):
    run = write_run(tmp_path / "run", 20)
    with (run / "metrics.jsonl").open("a", encoding="utf-8") as file:
        for i in range(1, 1001):
            noise = {f"more/{k}": (i * 7919 * (k + 1) % 9973) / 9973 for k in range(100)}
            file.write(json.dumps({"iteration": i, "metrics": noise, "time_s": 1.0}) + "\n")
    found = report_of(run)
    assert (run / "report.html").stat().st_size < 10e6
    assert len(found["main"]["runs"][0]["curves"]["more/99"]["x"]) == 1000


def test_samples_that_do_not_compress_are_halved_until_they_fit(tmp_path, monkeypatch):
    run = write_run(tmp_path / "run", 40)
    monkeypatch.setattr("mindspeed_rlxf.reporting.report.page.MAX_BYTES", 3_001_000)
    (found,) = report_of(run)["samples"]
    assert 0 < len(found["samples"]) < 60 and found["seen"] == 175


@pytest.mark.parametrize("make", [lambda p: None, lambda p: p.write_text(""), Path.mkdir])
def test_a_folder_without_iterations_is_one_line(tmp_path, capsys, make):
    make(tmp_path / "run")
    assert main([str(tmp_path / "run")]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: RUN=") and error.count("\n") == 1


def test_the_command_writes_into_the_run_or_to_the_chosen_file(tmp_path, capsys, monkeypatch):
    run, other = write_run(tmp_path / "run", 3), write_run(tmp_path / "other", 3)
    monkeypatch.chdir(tmp_path)
    assert main([str(run)]) == 0
    assert main([str(run), str(other), "--samples", "0"]) == 0
    assert [each["samples"] for each in parts(tmp_path / "report.html")["samples"]] == [[], []]
    assert main([str(run), "--output", str(tmp_path / "none" / "x.html")]) == 2
    assert main([str(run), "--samples=-1"]) == 2
    lines = capsys.readouterr()
    assert f"report: {run / 'report.html'} (0." in lines.out
    assert "--output" in lines.err and "--samples: -1 must be 0 or more" in lines.err
