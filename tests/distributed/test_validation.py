"""Sampled validations during a run, and the same ones by `validation.only`."""

from typing import Any

import pytest

from mindspeed_rlxf.checkpoint.directory import RunDirectory
from mindspeed_rlxf.trainer.preflight import prepare
from mindspeed_rlxf.trainer.validation import validate_only
from tests import training
from tests.chaos.same_run import lines_of
from tests.golden.runs import START, golden_config

PROMPTS, SAMPLES = 5, 3
KEYS = {
    "training.train_iters": 2, "critic.warmup_iters": 1, "data.val_files": START / "prompts.jsonl",
    "validation.interval": 1, "++validation.max_samples": PROMPTS,
    "++validation.n_samples": SAMPLES, "++validation.do_sample": True,
}  # fmt: skip


@pytest.mark.long
def test_validation_alone_repeats_that_of_the_run(warm_runtime, tmp_path):
    """In another layout, with the weights of the newest checkpoint or of the start."""
    run = training.run(golden_config("gae", tmp_path / "run", KEYS), warm_runtime)
    samples: dict[int, list[dict[str, Any]]] = {0: [], 1: [], 2: []}
    for sample in lines_of(run.val_samples):
        samples[sample.pop("iteration")].append(sample)
    assert [s["sample_id"] for s in samples[0]] == list(range(PROMPTS * SAMPLES))
    assert [s["prompt_id"] for s in samples[2]] == [i // SAMPLES for i in range(15)]
    assert [samples[n][0]["weights_version"] for n in range(3)] == [[0, 0], [0, 0], [1, 1]]
    assert samples[0] == samples[1] != samples[2], "the critic's warm-up leaves the policy alone"
    assert len({s["response"] for s in samples[0][:SAMPLES]}) > 1, "sampled"
    metrics = [line["metrics"] for line in lines_of(run.metrics)]
    for new_run, iteration in ((False, 2), (True, 0)):
        more = {"resource_pool.main": 2, "training.new_run": new_run, "++validation.only": True}
        only = golden_config("gae", tmp_path / "run", {**KEYS, **more})
        prepared, directory = prepare(only), RunDirectory.create(only)
        assert validate_only(only, prepared, directory, warm_runtime) == iteration
        directory.unlock()
        (line,) = lines_of(directory.metrics)
        assert line["iteration"] == iteration
        expected = {k: v for k, v in metrics[iteration].items() if k.startswith("val/")}
        assert line["metrics"] == expected and f"val/arithmetic/maj@{SAMPLES}" in expected
        found = lines_of(directory.val_samples)
        assert [s.pop("iteration") for s in found] == [iteration] * len(found)
        assert found == samples[iteration]
    folders = sorted(path.name for path in run.path.glob("validation*"))
    assert folders == ["validation", "validation-2"]
