"""Which rows a validation generates, scores and logs, in what order, and with which ids."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from mindspeed_rlxf.checkpoint.directory import RunDirectory
from mindspeed_rlxf.cluster.refs import RankRows, RowsRef
from mindspeed_rlxf.config.schema import (
    AlgorithmConfig,
    LoggingConfig,
    RewardConfig,
    RolloutConfig,
    ValidationConfig,
)
from mindspeed_rlxf.data.agent_record import AgentFailure, AgentRecord
from mindspeed_rlxf.data.batch import Prompts
from mindspeed_rlxf.data.prompts import Prompt
from mindspeed_rlxf.roles.reports import SampleText, ScoreReport, failed_by_agent
from mindspeed_rlxf.roles.reward import RewardsFailed
from mindspeed_rlxf.roles.rollout import Sampling
from mindspeed_rlxf.trainer.recorder import Recorder
from mindspeed_rlxf.trainer.validation import Scored, Validator

PROMPTS = [Prompt(9, "", np.array([i]), str(i), source) for i, source in enumerate("aab")]


class Answer:
    """A call that has ended, with reports of two replicas."""

    seconds = 1.0

    def __init__(self, rows: int, reports: list[Any]) -> None:
        self._rows, self._reports = rows, reports

    def rows(self) -> RowsRef:
        return RowsRef((RankRows("somewhere", self._rows),))

    def result(self) -> list[Any]:
        return self._reports


class Roles:
    """Two replicas generate and score; response i to prompt p scores p + i / 10."""

    def __init__(self, size: int) -> None:
        layout = SimpleNamespace(layout=SimpleNamespace(dp=2))
        self.size, self.called = size, list[Any]()
        self.rollout = self.reward = self.actor = self  # type: ignore[assignment]
        self.group = layout
        self.records: list[AgentRecord | None] = []  # of each replica's samples, if agents led them

    def update_weights(self, _actor: Any, version: int) -> None:
        self.called.append(version)

    def generate(self, prompts: Prompts, seed: int, sampling: Sampling) -> Answer:
        assert sampling is Sampling.VALIDATION
        self.given = prompts
        self.called.append(seed)
        return Answer(prompts.num_rows, [
            SimpleNamespace(
                response_lengths=[1] * half.num_rows, records=self.records[: half.num_rows],
                agent_failures=[failed_by_agent(0, record) for record in self.records],
            )
            for half in prompts.split(2)
        ])  # fmt: skip

    def score_by_rule(self, _rows: RowsRef) -> Answer:
        reports = []
        for half in self.given.split(2):
            scores = [i // self.size + i % self.size / 10 for i in half.sample_ids]
            answers = [str(i % self.size // 2) for i in half.sample_ids]
            reports.append(ScoreReport(scores, [{}] * len(scores), answers=list(answers)))
        return Answer(self.given.num_rows, reports)

    def score(self, _rows: RowsRef) -> Answer:
        self.called.append("model")
        halves = self.given.split(2)
        return Answer(0, [ScoreReport([5.0] * half.num_rows) for half in halves])

    def sample_texts(self, _rows: RowsRef, count: int) -> list[SampleText]:
        return [SampleText(i, [1], [2], (4, 4)) for i in self.given.sample_ids[:count]]


def make(tmp_path: Path, size: int, **keys: Any) -> tuple[Validator, Roles, RunDirectory]:
    config: Any = SimpleNamespace(
        validation=ValidationConfig(n_samples=size, do_sample=size > 1, **keys),
        training=SimpleNamespace(seed=7, train_iters=1),
        reward=RewardConfig.model_construct(failed_score=-0.5, max_failed=4),
        logging=LoggingConfig(samples=5),
        algorithm=AlgorithmConfig(),
        rollout=RolloutConfig(),
    )
    roles: Any = Roles(size)
    directory = RunDirectory(tmp_path)
    tokenizer = SimpleNamespace(decode=lambda ids, **_: str(ids))
    recorder = Recorder(config, directory, tokenizer)
    return Validator(config, roles, PROMPTS, recorder), roles, directory


def lines(file: Path) -> list[Any]:
    return [json.loads(line) for line in file.read_text().splitlines()]


def test_responses_to_a_prompt_are_scored_together_and_have_lasting_ids(tmp_path):
    validator, roles, directory = make(tmp_path, 3)
    first, second = validator.validate(0, 0, own_line=True), validator.validate(4, 2)
    assert roles.given.sample_ids == [0, 1, 2, 3, 4, 5, 6, 7, 8, 0], "full halves"
    assert [int(ids[0]) for ids in roles.given.token_ids] == [0, 0, 0, 1, 1, 1, 2, 2, 2, 0]
    assert first == second and roles.called == [0, validator.seed, 2, validator.seed]
    # prompts 0 and 1 with scores p, p + 0.1, p + 0.2: answers 0 0 1
    assert first["val/a/mean@3"] == pytest.approx(0.6) and first["val/b/mean@3"] == 2.1
    assert first["val/a/maj@3"] == pytest.approx(0.55)
    assert first["val/a/best@3"] == pytest.approx(0.7)
    # above 0: two of three, all of three
    assert first["val/a/pass@1"] == pytest.approx(5 / 6) and first["val/a/pass@2"] == 1.0
    assert [line["iteration"] for line in lines(directory.metrics)] == [0]
    samples = lines(directory.val_samples)
    assert [sample["iteration"] for sample in samples] == [0] * 5 + [4] * 5
    for of_one in (samples[:5], samples[5:]):
        assert [sample["sample_id"] for sample in of_one] == [0, 1, 2, 3, 4]
        assert [sample["prompt_id"] for sample in of_one] == [0, 0, 0, 1, 1]
        assert [sample["answer"] for sample in of_one] == ["0", "0", "1", "0", "0"]
        assert [sample["ground_truth"] for sample in of_one] == ["0", "0", "0", "1", "1"]
        assert of_one[4]["score"] == 1.1


def test_validation_scores_by_the_model_where_configured(tmp_path):
    validator, roles, directory = make(tmp_path, 1, reward="model")
    found = validator.validate(1, 1)
    assert "model" in roles.called and found["val/b/mean@1"] == 5.0
    assert not any("pass@" in name for name in found)
    assert "answer" not in lines(directory.val_samples)[0]


def test_failed_conversations_count_with_the_score_of_failures(tmp_path):
    """Left out, they would raise the mean; prompts are 3, of data sources a, a, b, and a again."""
    validator, roles, _ = make(tmp_path, 1)
    failure = AgentFailure("exception", "no database")
    roles.records = [None, AgentRecord("test", [], [], failure=failure)]
    found = validator.validate(1, 1)
    assert found["val/a/score"] == (0.0 - 0.5) / 2 and found["val/agent_failures"] == 1.0
    validator.reward = validator.reward.model_copy(update={"max_failed": 1})
    with pytest.raises(RewardsFailed, match="no database"):
        validator.validate(2, 2)


@pytest.mark.parametrize(
    ("score", "parts", "partly"),
    [(0.5, {}, True), (0.5, {"mine/accuracy": 0.0}, False), (1.0, {}, False), (0.0, {}, False)],
)
def test_partial_credit_without_accuracy_is_found(score, parts, partly):
    """It counts as right in pass@K."""
    assert Scored(score, 3, parts).has_partial_credit == partly


def test_without_prompts_nothing_happens(tmp_path):
    validator, roles, _ = make(tmp_path, 1)
    validator.prompts = validator.prompts.select([])
    assert validator.validate(1, 1) == {} and roles.called == []
