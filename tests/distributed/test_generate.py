"""`generate` answers as the run does, from its folder, a checkpoint or exported weights."""

import json
from pathlib import Path
from typing import Any

from tests.distributed.llamas import PLAIN, make_models
from tests.processes import run_python
from tests.trl.record import EOS


def lines_of(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]


def test_responses_are_those_of_the_run_and_of_its_exported_weights(tmp_path: Path) -> None:
    models = make_models(tmp_path / "models", PLAIN)
    run_python("-m", "tests.distributed.generate_run", models, tmp_path, timeout_s=240)
    found = {
        name: lines_of(tmp_path / f"{name}.jsonl")
        for name in ("sampled", "newest", "exported", "transformers", "adapters", "merged")
    }
    # Iteration 2 drew samples 16 to 31 with the weights of checkpoint 1.
    samples = lines_of(tmp_path / "run" / "samples.jsonl")
    drawn = [sample["response"] for sample in samples[16:]]
    sampled = found["sampled"]
    assert [line["prompt"] for line in sampled] == [sample["prompt"] for sample in samples]
    ends = [f" {EOS}" if line["finish_reason"] == "stop" else "" for line in sampled]
    texts = [f"{line['response']}{end}".strip() for line, end in zip(sampled, ends, strict=True)]
    assert texts[16:] == drawn and len(set(drawn)) > 8
    assert texts[:16] != [sample["response"] for sample in samples[:16]], "of older weights"
    assert sampled[0]["ground_truth"] == "7"

    answers = {name: [line["response"] for line in lines] for name, lines in found.items()}
    assert answers["newest"] == answers["exported"] == answers["transformers"]
    assert answers["newest"] != answers["sampled"]
    assert answers["adapters"] == answers["merged"] != answers["newest"]
