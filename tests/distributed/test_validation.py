"""Sampled validations during a run, and the same ones by `validation.only`."""

from typing import Any

import pytest

from mindspeed_rlxf.checkpoint.directory import RunDirectory
from mindspeed_rlxf.config.enums import RewardKind
from mindspeed_rlxf.config.schema import RunConfig, ValidationConfig
from mindspeed_rlxf.trainer.preflight import prepare
from mindspeed_rlxf.trainer.validation import validate_only
from tests import training
from tests.chaos.same_run import lines_of
from tests.distributed.llamas import PLAIN, make_pair
from tests.distributed.test_ppo_run import VOCAB, small_run, write_prompts, write_tokenizer

PROMPTS, SAMPLES = 5, 3


@pytest.mark.long
def test_validation_alone_repeats_that_of_the_run(warm_runtime, tmp_path):
    """In another layout, with the weights of the newest checkpoint or of the start."""
    architecture = PLAIN.model_copy(update={"vocab_size": VOCAB})
    lm, scored = make_pair(tmp_path, architecture)
    texts = [f"count to {n}" for n in range(40)]
    write_prompts(tmp_path / "train.jsonl", texts)
    write_prompts(tmp_path / "val.jsonl", texts[:PROMPTS])
    write_tokenizer(tmp_path / "tokenizer", texts)
    keys: dict[str, Any] = {"interval": 1, "n_samples": SAMPLES, "do_sample": True}

    def configured(ranks: int, new_run: bool = False, **validation: Any) -> RunConfig:
        config = small_run(
            tmp_path, lm, scored, architecture, ranks,
            training={"train_iters": 2, "new_run": new_run},
            data={"val_files": (str(tmp_path / "val.jsonl"),)},
            reward={"kind": RewardKind.RULE, "model": None, "architecture": None, "load": None},
            critic={"critic_mini_batch_size": 4, "warmup_iters": 1},
        )  # fmt: skip
        settings = ValidationConfig(**{**keys, **validation})
        return config.model_copy(update={"validation": settings})

    config = configured(1)
    run = training.run(config, warm_runtime)
    samples: dict[int, list[dict[str, Any]]] = {0: [], 1: [], 2: []}
    for sample in lines_of(run.val_samples):
        samples[sample.pop("iteration")].append(sample)
    assert [s["sample_id"] for s in samples[0]] == list(range(PROMPTS * SAMPLES))
    assert [s["prompt_id"] for s in samples[2]] == [i // SAMPLES for i in range(15)]
    assert [samples[n][0]["weights_version"] for n in range(3)] == [[0, 0], [0, 0], [1, 1]]
    assert samples[0] == samples[1] != samples[2], "the critic's warm-up leaves the policy alone"
    assert len({s["response"] for s in samples[0][:SAMPLES]}) > 1, "sampled"
    metrics = [line["metrics"] for line in lines_of(run.metrics)]
    for ranks, new_run, iteration in ((2, False, 2), (2, True, 0)):
        only = configured(ranks, new_run, only=True)
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
    assert sorted(path.name for path in run.path.glob("validation*")) == [
        "validation", "validation-2",
    ]  # fmt: skip
