"""Responses are scored while others are generated; a failure is that of one sample."""

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from mindspeed_rlxf.config import plugins
from mindspeed_rlxf.config.schema import RewardConfig
from mindspeed_rlxf.data.agent_record import AgentFailure, AgentRecord
from mindspeed_rlxf.data.batch import Prompts
from mindspeed_rlxf.roles import scorer as module
from mindspeed_rlxf.roles.requests import gather_rollouts
from mindspeed_rlxf.roles.scorer import ScorerRole
from mindspeed_rlxf.rollout.rollout_engine import FinishReason, GenerationResult
from tests.registries import restored_registries
from tests.unit.data.byte_tokenizer import byte_tokenizer

TEXT = """
import os, time

def score(prompt, response, ground_truth, extra_info, data_source):
    if response == "wait":  # until the last response is there
        while not os.path.exists(extra_info["flag"]):
            time.sleep(0.005)
    right = float(response == ground_truth)
    return {"score": right, "said": len(prompt), "is_a": data_source == "a"}
"""
TOKENIZER = byte_tokenizer()


@pytest.fixture(autouse=True)
def registries() -> Iterator[None]:
    with restored_registries():
        yield


@pytest.fixture
def role(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ScorerRole]:
    source = plugins.Source(str(tmp_path / "mine.py"), TEXT)
    plugins.carry(source)
    function = {"function": f"{source.file}:score", "sha256": source.sha256, "name": "mine"}
    keys = {"kind": "rule", "function": function, "processes": 2, "timeout_s": 20.0}
    keys |= {"worker_memory_gib": 4.0, "failed_score": -0.25}
    monkeypatch.setattr(module, "load_tokenizer", lambda folder: TOKENIZER)
    made = ScorerRole(_config(keys))
    yield made
    made.rewards._pool.close()


def _config(keys: dict[str, Any]) -> Any:
    reward = RewardConfig.model_validate(keys)
    training = SimpleNamespace(tokenizer_name_or_path="nowhere")
    actor = SimpleNamespace(stop_strings=())
    return SimpleNamespace(reward=reward, verifiers=[], training=training, actor_rollout=actor)


def prompts_of(texts: list[str], **extra: Any) -> Prompts:
    count = len(texts)
    return Prompts(
        sample_ids=list(range(10, 10 + count)),
        token_ids=[np.array(TOKENIZER("1+1=")["input_ids"])] * count,
        ground_truths=["2"] * count,
        data_sources=["a"] * count,
        responses=[[]] * count,
        extra_infos=[extra] * count,
    )


def results_of(texts: list[str]) -> Iterator[GenerationResult]:
    for place in reversed(range(len(texts))):  # in no fixed order
        tokens = TOKENIZER(texts[place], add_special_tokens=False)["input_ids"]
        yield GenerationResult(place, tokens, [-1.0] * len(tokens), FinishReason.LENGTH, 0)


def test_a_response_is_scored_before_the_last_one_is_there(role, tmp_path):
    texts = ["wait", "2", "3", "2"]
    prompts = prompts_of(texts, flag=str(tmp_path / "flag"))
    submitted: list[Any] = []
    submit = role.rewards.submit
    role.rewards.submit = lambda sample: submitted.append(submit(sample)) or submitted[-1]  # type: ignore

    def generation() -> Iterator[GenerationResult]:
        *first, last = results_of(texts)
        yield from first
        assert [module.join_scoring(s).result.score for s in submitted] == [1.0, 0.0, 1.0]
        (tmp_path / "flag").touch()
        yield last

    rollouts = gather_rollouts(prompts, role.follow(prompts, generation()))
    output = role.score(rollouts)
    assert output.report.scores == [0.0, 1.0, 0.0, 1.0]
    assert len(submitted) == 4, "what was scored already is not scored again"
    part = {"mine": 1.0, "mine/said": 4.0, "mine/is_a": 1.0}
    assert output.report.parts[1] == part and output.report.failures == [None] * 4
    assert isinstance(output.rows, module.RuleScores)
    assert output.rows.scores.tolist() == [0.0, 1.0, 0.0, 1.0]


def test_a_failure_is_that_of_one_sample(role):
    """It has reward.failed_score; here the row lacks what the function reads."""
    texts = ["2", "wait", "2"]
    prompts = prompts_of(texts)  # no `flag`
    output = role.score(gather_rollouts(prompts, role.follow(prompts, results_of(texts))))
    assert output.report.scores == [1.0, -0.25, 1.0]
    first, failure, _ = output.report.failures
    assert first is None and (failure.sample_id, failure.cause) == (11, "exception")
    assert failure.message == "KeyError: 'flag'"
    for said in ("response: 'wait'", "mine.py:score", 'mine.py", line 6, in score'):
        assert said in failure.details
    assert "scoring.py" not in failure.details, "the traceback begins with the user's function"


def test_rules_beside_a_model_score_the_rows_that_are_labelled_so(monkeypatch):
    """With `rules` alone a row without a label is the model's; validation by rules scores all."""
    monkeypatch.setattr(module, "load_tokenizer", lambda folder: TOKENIZER)
    keys = {"kind": "huggingface", "rules": {"a": "gsm8k"}, "worker_memory_gib": 4.0}
    role = ScorerRole(_config(keys))
    prompts = prompts_of(["2", "2", "2"])
    prompts.extra_infos[:] = [{"reward_model": {"style": s}} for s in ("rule", "model")] + [{}]
    rollouts = gather_rollouts(prompts, role.follow(prompts, results_of(["2", "2", "2"])))
    assert role.score(rollouts).report.scores == [1.0, 0.0, 0.0]
    assert role.score(rollouts, True).report.scores == [1.0, 1.0, 1.0]
    role.rewards._pool.close()


def test_rows_that_were_not_followed_are_scored_when_they_are_asked_for(role):
    texts = ["2", "3"]
    prompts = prompts_of(texts)
    rollouts = gather_rollouts(prompts, results_of(texts))
    assert role.score(rollouts).report.scores == [1.0, 0.0]
    for _ in range(2):  # the same samples, with other responses
        other = gather_rollouts(prompts, role.follow(prompts, results_of(["3", "2"])))
        assert role.score(other).report.scores == [0.0, 1.0]
    list(role.follow(prompts, results_of(["3", "2"])))
    assert role.score(rollouts).report.scores == [1.0, 0.0], "scores of other responses"


def test_a_scoring_that_was_started_is_kept_until_its_sample_is_forgotten(role):
    """However many calls come in between; a validation has the same sample ids."""
    prompts = prompts_of(["2", "3"])
    results = sorted(results_of(["2", "3"]), key=lambda result: result.place)
    submitted: list[Any] = []
    submit = role.rewards.submit
    role.rewards.submit = lambda sample: submitted.append(sample) or submit(sample)
    for _ in range(2):  # the second time as after a resume
        for row, result in enumerate(results):
            role.start(prompts.select([row]), result)
    rollouts = gather_rollouts(prompts, iter(results))
    for _ in range(3):
        list(role.follow(prompts, results_of(["5", "2"])))
        assert role.score(rollouts).report.scores == [1.0, 0.0]
    assert len(submitted) == 2 + 3 * 2
    saved = json.loads(
        json.dumps([role.save_outcomes(10 + n, r.tokens) for n, r in enumerate(results)])
    )
    role.forget([10, 77])
    assert role.score(rollouts).report.scores == [1.0, 0.0] and len(submitted) == 9
    assert role.save_outcomes(10, results[0].tokens) is None
    role.restore_outcomes(10, results[0].tokens, saved[0])
    role.restore_outcomes(11, results[1].tokens, saved[1])
    report = role.score(rollouts).report
    assert report.scores == [1.0, 0.0] and report.failures == [None] * 2 and len(submitted) == 9
    assert report.parts[0] == {"mine": 1.0, "mine/said": 4.0, "mine/is_a": 1.0}


def test_a_validation_gets_its_own_score_where_a_training_sample_has_its_id_and_response(role):
    trained, validated = prompts_of(["2"]), prompts_of(["2"])
    validated.ground_truths[:] = ["5"]
    (result,) = results_of(["2"])
    role.start(trained, result)
    rollouts = gather_rollouts(validated, role.follow(validated, iter([result])))
    assert role.score(rollouts).report.scores == [0.0]
    assert role.score(gather_rollouts(trained, [result])).report.scores == [1.0]


def test_a_failed_scoring_is_saved_as_one_and_an_unfinished_one_is_not(role, tmp_path):
    flag = tmp_path / "flag"
    waits, fails = prompts_of(["wait"], flag=str(flag)), prompts_of(["wait"])
    (result,) = results_of(["wait"])
    role.start(waits, result)
    assert role.save_outcomes(10, result.tokens) is None
    flag.touch()
    role.forget([10])
    role.start(fails, result)
    rollouts = gather_rollouts(fails, [result])
    failures = role.score(rollouts).report.failures
    saved = json.loads(json.dumps(role.save_outcomes(10, result.tokens)))
    role.restore_outcomes(10, result.tokens, saved)
    assert role.score(rollouts).report.failures == failures and failures[0].cause == "exception"


def test_validation_reads_no_scoring_of_a_training_sample_with_its_id(role):
    """Their prompts differ, though the responses may be equal."""
    trained, validated = prompts_of(["2"]), replace(prompts_of(["2"]), ground_truths=["7"])
    (result,) = results_of(["2"])
    role.start(trained, result)
    rollouts = gather_rollouts(validated, [result])
    assert role.score(rollouts, validates=True).report.scores == [0.0]


def test_rules_read_special_tokens_and_no_eos(monkeypatch):
    """As a policy that has been taught `<think>` and `<answer>` as special tokens writes them."""
    tags = ["<think>", "</think>", "<answer>", "</answer>"]
    tokenizer = byte_tokenizer(["<pad>", "</s>", "<|im_end|>", *tags], eos="</s>")
    monkeypatch.setattr(module, "load_tokenizer", lambda folder: tokenizer)
    role = ScorerRole(_config({"kind": "rule", "rules": {"a": "format"}, "worker_memory_gib": 4.0}))
    prompts, results = prompts_of(["", "", ""]), []
    for place, behind in enumerate(("", "</s>", "<|im_end|>")):
        reason = FinishReason.STOP if behind else FinishReason.LENGTH
        tokens = tokenizer(f"<think>2+2</think><answer>4</answer>{behind}")["input_ids"]
        results.append(GenerationResult(place, tokens, [-1.0] * len(tokens), reason, 0))
    followed = gather_rollouts(prompts, role.follow(prompts, iter(results)))
    assert role.score(followed).report.scores == [1.0, 1.0, 1.0]
    assert role.score(followed, True).report.scores == [1.0, 1.0, 1.0]
    role.rewards._pool.close()


@pytest.mark.parametrize(("agent_text", "right"), [("all", "ab<c>d"), ("last_turn", "d")])
def test_functions_read_a_conversation_or_its_last_turn(
    role: ScorerRole, agent_text: str, right: str
) -> None:
    """As responses end, and where `score` begins; a failed conversation is not scored."""
    role.reward = role.reward.model_copy(update={"agent_text": agent_text})
    ids = TOKENIZER.encode("ab<c>d", add_special_tokens=False)
    record = AgentRecord("test", [(0, 2), (5, 6)], [0.0, 0.0])
    failed = replace(record, failure=AgentFailure("timeout", "too late", "the stack"))
    prompts = Prompts(
        [4, 5], [np.array(ids[:1])] * 2, [right] * 2, ["a"] * 2, [[]] * 2,
        extra_infos=[record.add_to({"flag": ""}), failed.add_to({"flag": ""})],
    )  # fmt: skip
    trained = [[True, True, False, False, False, True], [False] * 6]
    results = [
        GenerationResult(n, ids, [0.0] * 6, FinishReason.LENGTH, 0, trained=trained[n])
        for n in range(2)
    ]
    for begins_early in (True, False):
        if begins_early:
            for row in range(2):
                role.start(prompts.select([row]), results[row])
        output: Any = role.score(gather_rollouts(prompts, results))
        assert output.report.scores == [1.0, 0.0]
        assert output.report.is_scored == [True, False]
        (_, failure) = output.report.failures
        assert failure.cause == "agent_timeout" and failure.details == "the stack"
        role.forget([4, 5])
