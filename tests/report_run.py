"""Write the files of an artificial run of any size, for tests of the report."""

import json
import math
from pathlib import Path
from typing import Any

from mindspeed_rlxf.reporting.jsonl import JsonlWriter, Sample, metrics_record, write_tokens

CONFIG = """\
training: {{train_iters: {iterations}, run_name: {name}}}
actor_rollout: {{lr: {lr}, model: tiny, load: models/sft, do_sample: true, temperature: 0.7}}
validation: {{best_metric: score, do_sample: false, temperature: 1.0}}
algorithm: {{adv_estimator: gae, kl_ctrl: {{type: fixed, target_kl: 6.0}}}}
logging: {{samples: 4}}
placement: {{actor_rollout: main, critic: main}}
"""
PHASES = ("gen", "old_log_prob", "ref", "values", "adv", "update_critic", "update_actor")
EVIL = "</script><img src=x onerror=\"window.hacked='yes'\">\u202egnp.exe\x1b[31m\x00 \ud800"
HAN = "北京是中国的首都。"


def metrics_of(iteration: int, rise: float = 0.5) -> dict[str, float]:
    """Return the metrics of an iteration of a run whose score rises by `rise` in about 100
    iterations."""
    grown = 1.0 - math.exp(-iteration / 30.0)
    wave = 0.02 * math.sin(iteration * 1.7)
    score = 0.3 + rise * grown + wave
    return {
        "critic/score/mean": score, "critic/score/max": 1.0, "critic/score/min": 0.0,
        "critic/kl": 0.15 * grown + abs(wave), "actor/entropy": 0.6 - 0.4 * grown,
        "response_length/mean": 40.0 + wave, "actor/lr": 1e-5, "actor/pg_loss": wave,
        "actor/grad_norm": 1.0 + wave, "critic/grad_norm": 1.0 + wave,
        "train/sums/score": score + 0.01, "actor/pg_clipfrac": 0.0,
        "slowest_rank/gen": float(iteration % 2), "critic/vf_loss": 0.2 - 0.1 * grown,
        "throughput/tokens_per_s": 900.0, "timing/all": 2.0 + wave,
        **{f"timing/{phase}": 0.25 + wave / 10 for phase in PHASES},
    }  # fmt: skip


def sample_of(iteration: int, i: int, text: str, **more: Any) -> Sample:
    """Return sample `i` of an iteration with the response `text`. more: further fields of Sample"""
    ids = [ord(letter) % 200 for letter in text]
    score = float((iteration + i) % 2)
    fields = {"data_source": f"source {i % 2}", **more}
    return Sample(
        100 * iteration + i, f"prompt {i}: {text[:20]}", text, [1, 2], ids, score,
        {"accuracy": score}, (iteration - 1, iteration), **fields,
    )  # fmt: skip


def write_run(
    run: Path, iterations: int = 40, samples: int = 4, rise: float = 0.5, lr: float = 0.5,
    texts: tuple[str, ...] = (HAN, EVIL, "plain"), validations: int = 4,
) -> Path:  # fmt: skip
    """Write metrics, samples and tokens of a run that ended without failure."""
    run.mkdir(parents=True)
    config = CONFIG.format(iterations=iterations, name=run.name, lr=lr)
    (run / "config.yaml").write_text(config, encoding="utf-8")
    metrics = JsonlWriter(run / "metrics.jsonl")
    training = JsonlWriter(run / "samples.jsonl")
    validation = JsonlWriter(run / "val_samples.jsonl")
    every = max(iterations // validations, 1)
    for iteration in range(iterations + 1):
        numbers = metrics_of(iteration, rise) if iteration else {}
        if iteration % every == 0:
            numbers["val/sums/score"] = metrics_of(iteration, rise)["critic/score/mean"]
            for i in range(3):
                more = {"prompt_id": i, "ground_truth": "7", "answer": str(i)}
                sample = sample_of(iteration, i, f"{i + iteration}", **more)
                validation.write(sample.record(iteration))
        metrics.write(metrics_record(iteration, numbers, numbers.get("timing/all", 0.0)))
        if not iteration:
            continue
        written = [sample_of(iteration, i, texts[i % len(texts)]) for i in range(samples)]
        for sample in written:
            training.write(sample.record(iteration))
        write_tokens(run / "samples_tokens", 0, iteration, {
            s.sample_id: _numbers(s) for s in written
        })  # fmt: skip
    for writer in (metrics, training, validation):
        writer.close()
    return run


def _numbers(sample: Sample) -> dict[str, list[float]]:
    """Return one number per response token for each of advantage, kl and value."""
    count = len(sample.response_ids)
    names = ("advantage", "kl", "value")
    return {name: [math.sin(i + k) for i in range(count)] for k, name in enumerate(names)}


def damage(run: Path) -> None:
    """Cut the last line of every file of the run, as a kill does, and write a null as a metric."""
    with (run / "metrics.jsonl").open("a", encoding="utf-8") as file:
        values = {"critic/score/mean": None, "actor/pg_loss": 0.5}
        file.write(json.dumps({"iteration": 41, "metrics": values, "time_s": 1.0}) + "\n")
        file.write('{"iteration": 42, "metr')
    for name in ("samples.jsonl", "val_samples.jsonl", "samples_tokens/rank_00000.jsonl"):
        with (run / name).open("a", encoding="utf-8") as file:
            file.write('{"iteration": 41, "sample_id": 9, "prom')
