"""A training runs programs from responses, and scores samples by what the programs print."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from mindspeed_rlxf.checkpoint.directory import RunDirectory
from mindspeed_rlxf.config.problems import UserError
from mindspeed_rlxf.config.reward_section import SandboxConfig
from mindspeed_rlxf.rewards.sandbox import Sandbox
from mindspeed_rlxf.trainer.preflight import prepare
from tests.distributed.llamas import make_llama
from tests.golden.runs import golden_config
from tests.training import train
from tests.unit.data.byte_tokenizer import byte_tokenizer

SUM = json.dumps({"inputs": ["1 2\n", "3 4\n"], "outputs": ["3\n", "7\n"]})
ADD = "```python\nprint(sum(map(int, input().split())))\n```"
# response -> score, accuracy
RESPONSES = {
    ADD: (1.0, 1.0),
    "```python\nprint(3)\n```": (0.5, 0.0),  # right for one of two inputs
    "```python\nwhile True: pass\n```": (0.0, 0.0),
    "print(sum(map(int, input().split())))": (0.0, 0.0),  # not in a block
}
ITERATIONS = 2


@pytest.fixture(scope="module", autouse=True)
def isolated() -> None:
    try:
        Sandbox.choose(SandboxConfig())
    except UserError as error:
        pytest.skip(f"no level of isolation works here: {error}")


def write_rows(file: Path, rows: list[dict[str, Any]]) -> str:
    file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return str(file)


@pytest.mark.parametrize(
    ("keys", "part"),
    [
        pytest.param({"+reward.rules": "{tasks: code}"}, "", id="rule"),
        pytest.param(
            {"+reward.functions": "[{function: code, name: tests, weight: 2.0}]"},
            "tests/",
            id="function",
            marks=pytest.mark.long,
        ),
    ],
)
def test_a_run_scores_responses_by_what_their_programs_print(
    warm_runtime: Any, tmp_path: Path, keys: dict[str, Any], part: str
) -> None:
    """Two iterations of one prompt with four responses each, given by a file."""
    tokenizer = byte_tokenizer()
    tokenizer.save_pretrained(tmp_path / "lm")
    row = {"prompt": "Add.", "ground_truth": SUM, "data_source": "tasks"}
    given = [{"response": text} for text in RESPONSES] * ITERATIONS
    config = golden_config(
        "grpo",
        tmp_path / "out",
        {
            "model.tiny.vocab_size": len(tokenizer),
            "model.tiny.max_position_embeddings": 128,
            "training.train_iters": ITERATIONS,
            "training.seq_length": 128,
            "training.global_batch_size": 1,
            "training.tokenizer_name_or_path": tmp_path / "lm",
            "actor_rollout.load": tmp_path / "lm",
            "actor_rollout.ppo_mini_batch_size": 4,
            "actor_rollout.micro_batch_size": 4,
            "actor_rollout.max_new_tokens": 64,
            "+actor_rollout.fixed_responses": write_rows(tmp_path / "given.jsonl", given),
            "ref.load": tmp_path / "lm",
            "data.train_files": write_rows(tmp_path / "rows.jsonl", [row] * 2),
            "+reward.processes": 2,
            "+reward.sandbox.cpu_s": 0.5,
            **keys,
        },
    )
    assert config.actor_rollout.architecture is not None
    make_llama(tmp_path / "lm", config.actor_rollout.architecture)
    directory = RunDirectory.create(config)
    prepared = prepare(config)
    assert any(line.startswith("sandbox: ") for line in prepared.notices)
    train(config, prepared, directory, warm_runtime)
    weight = config.reward.parts[0].weight if part else 1.0
    samples = [json.loads(line) for line in directory.samples.open()]
    found = {sample["response"]: sample["score"] for sample in samples}
    end = tokenizer.eos_token
    assert found == {text + end: weight * score for text, (score, _) in RESPONSES.items()}
    metrics = [json.loads(line)["metrics"] for line in directory.metrics.open()]
    assert len(metrics) == ITERATIONS
    for line in metrics:
        assert line.get("reward/failed", 0.0) == 0.0
        assert line[f"reward/{part}accuracy"] == 1 / 4
        assert line["critic/score/mean"] == pytest.approx(weight * 1.5 / 4)
    assert metrics[-1]["actor/grad_norm"] > 0
