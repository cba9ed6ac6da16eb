"""Which rules and functions a configuration scores by, and where they run."""

from collections.abc import Iterator
from concurrent.futures import Future
from typing import Any

import pytest
from pydantic import ValidationError

from mindspeed_rlxf.config import plugins
from mindspeed_rlxf.config.schema import RewardConfig, SandboxConfig
from mindspeed_rlxf.rewards.outcome import Cause, Outcome, Sample, to_result
from mindspeed_rlxf.rewards.plans import (
    Scoring,
    StreamingRewards,
    check_functions,
    join_scoring,
    make_plan,
    needs_processes,
    rule_decides,
)
from mindspeed_rlxf.rewards.rules import BUILTIN_SOURCES, RewardResult
from tests.registries import restored_registries

MATH = "HuggingFaceH4/MATH-500"


@pytest.fixture(autouse=True)
def registries() -> Iterator[None]:
    with restored_registries():
        yield


def reward(*functions: dict[str, Any], **keys: Any) -> RewardConfig:
    named = [{"name": f"part{i}", **function} for i, function in enumerate(functions)]
    return RewardConfig.model_validate({"kind": "rule", "functions": named, **keys})


def test_functions_and_slow_rules_are_scored_in_processes() -> None:
    assert not needs_processes(reward(), ["gsm8k", "arithmetic", "unknown"])
    assert needs_processes(reward(), ["gsm8k", MATH])
    assert needs_processes(reward(rules={"mine": "math"}), ["mine"])
    assert not needs_processes(reward(rules={MATH: "gsm8k"}), [MATH])
    assert needs_processes(reward({"function": "gsm8k"}), ["gsm8k"])
    assert not needs_processes(reward(verifier=True), [MATH]), "verifiers score all alike"
    assert needs_processes(reward(rules={"mine": "code_all"}), ["mine"])


def test_a_rule_decides_for_data_sources_without_a_reward_function() -> None:
    some = reward({"function": "gsm8k", "data_sources": ["a"]}, {"url": "http://h/"})
    assert not rule_decides(some, "a") and not rule_decides(some, "b")
    only_a = reward({"function": "gsm8k", "data_sources": ["a"]})
    assert not rule_decides(only_a, "a") and rule_decides(only_a, "b")
    assert rule_decides(reward({"function": "rule"}), "a")
    beside = only_a.model_copy(update={"kind": "model"})
    assert not rule_decides(beside, "b"), "the model scores it"


@pytest.mark.parametrize(
    ("function", "arguments", "why"),
    [
        ("gms8k", {}, "reward.functions.part0=gms8k must be path/to/file.py:name, or one of"),
        ("length", {"longest": 9}, "got an unexpected keyword argument 'longest'"),
        ("length", {"max_characters": "abc"}, "the rule length must take its arguments: '<=' not"),
        ("format", {"pattern": "("}, "unterminated subpattern"),
        ("multiple_choice", {"choices": 3}, "'int' is not iterable"),
    ],
)
def test_functions_have_to_name_rules_that_take_their_arguments(
    function: str, arguments: dict[str, Any], why: str
) -> None:
    right = {"function": "length", "arguments": {"max_characters": 9}}
    wrong = {"function": function, "arguments": arguments}
    found = check_functions(reward(wrong, right, {"function": "rule"}, {"url": "http://h/"}))
    (problem,) = map(str, found)
    assert why in problem


def test_a_plan_has_every_text_that_a_process_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plugins, "_loaded", {})  # without those of other tests
    mine = plugins.Source("/gone/mine.py", "def score(): ...")
    plugins.carry(mine)
    registers = "from mindspeed_rlxf.rewards.rules import register_rule\n"
    plugin = plugins.Source("/gone/rules.py", registers + "register_rule('own')(lambda a, b: 0)\n")
    plugins.load(plugin)
    file = {"function": "/gone/mine.py:score", "sha256": mine.sha256}
    plan = make_plan(reward(file, {"function": "length"}, {"url": "http://h/"}))
    assert [(part.function, source) for part, source in plan.functions] == [
        ("/gone/mine.py:score", mine),
        ("length", None),
    ]
    assert plan.rules == BUILTIN_SOURCES and plan.plugins == ()
    assert make_plan(reward(file, rules={"x": "own"})).plugins == (plugin,)
    assert make_plan(reward({"function": "own"})).plugins == (plugin,)
    assert plan.defaults and not make_plan(reward(file, kind="huggingface")).defaults
    limits = {"sandbox": {"memory_mb": 77}}
    assert make_plan(reward(**limits)).sandbox is None
    for runs in (reward(rules={"x": "code"}, **limits), reward({"function": "code"}, **limits)):
        assert make_plan(runs).sandbox == SandboxConfig(memory_mb=77)


def test_a_score_of_none_is_left_out_of_the_sum() -> None:
    """TRL adds up without it too (`nansum`), and warns if every function returns None."""

    def join(*scores: Any, **more: bool) -> Outcome:
        scoring: Scoring = []
        for place, score in enumerate(scores):
            future: Future[Outcome] = Future()
            future.set_result(Outcome(to_result(score)))
            scoring.append((f"part{place}", 2.0, future))
        return join_scoring(scoring, **more)

    assert join(1.0, None).result == RewardResult(2.0, {"part0": 1.0})
    both = join({"score": None, "length": 3, "unknown": None}, 0.5).result
    assert both == RewardResult(1.0, {"part0/length": 3.0, "part1": 0.5})
    assert join(None, None).cause is Cause.WRONG_RESULT, "nothing scores it"
    assert join(None, beside_model=True).result == RewardResult(0.0), "the model scores it"
    assert join().result == RewardResult(0.0)


def test_rules_score_the_validation_of_a_model_without_functions() -> None:
    """Also slow ones, in processes; an expression without end is a failure and no score."""
    tower = "9^{" * 6 + "9" + "}" * 6
    endless = f"\\boxed{{{tower}}}", f"8{tower[1:]}"
    # A limit that the two others keep on any machine, and one that nothing need keep.
    for timeout_s, texts in (
        (600.0, [("\\boxed{7}", "7"), ("\\boxed{7}", "8")]),
        (1.0, [endless]),
    ):
        beside_model = reward(kind="huggingface", processes=1, timeout_s=timeout_s)
        assert needs_processes(beside_model, [MATH])
        rewards = StreamingRewards(beside_model)
        scorings = [rewards.submit(Sample("", *pair, MATH)) for pair in texts]
        outcomes = [join_scoring(scoring) for scoring in scorings]
        rewards._pool.close()
        if texts == [endless]:
            assert outcomes[0].cause is Cause.TIMEOUT
        else:
            assert [each.result and each.result.score for each in outcomes] == [1.0, 0.0]


def test_a_process_is_not_killed_before_the_programs_of_a_response_have_ended() -> None:
    """20 s for each part that runs programs for one sample, and 30 s for all of them."""
    code = {"function": "code"}
    by_rule = {"rules": {"a": "code"}, "timeout_s": 20}
    rule = r"timeout_s=20\.0 must be above 20.*sandbox\.response_s"
    with pytest.raises(ValidationError, match=rule):
        reward(**by_rule)
    with pytest.raises(ValidationError, match="must be above 40"):
        reward(code, {"function": "code_all"})
    reward(timeout_s=20)
    reward(**by_rule, sandbox={"response_s": 19})
    reward({**code, "data_sources": ["a"]}, {"function": "code_all", "data_sources": ["b"]})
    both = {"rules": {"a": "code"}}
    reward({"function": "rule", "data_sources": ["b"]}, code, **both)
    with pytest.raises(ValidationError, match="must be above 40"):
        reward({"function": "rule"}, code, **both)
