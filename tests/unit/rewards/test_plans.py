"""Which rules and functions a configuration scores by, and where they run."""

from collections.abc import Iterator
from typing import Any

import pytest
from pydantic import ValidationError

from mindspeed_rlxf.config import plugins
from mindspeed_rlxf.config.schema import RewardConfig, SandboxConfig
from mindspeed_rlxf.rewards.outcome import Cause, Outcome, Sample
from mindspeed_rlxf.rewards.plans import (
    StreamingRewards,
    check_functions,
    find_idle_sources,
    make_plan,
    needs_processes,
    rule_decides,
)
from mindspeed_rlxf.rewards.rules import BUILTIN_SOURCES
from mindspeed_rlxf.rewards.workers import WorkerPool
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


def test_data_sources_that_no_row_has_are_named() -> None:
    some = reward({"function": "length", "data_sources": ["a", "b"]}, rules={"c": "gsm8k"})
    assert list(find_idle_sources(some, {"a", "b", "c"})) == []
    rules, part = find_idle_sources(some, {"a"})
    assert rules == "reward.rules: no row has the data source c; there are a"
    assert "part0: no row has the data source b" in part


def test_a_plan_has_every_text_that_a_process_needs() -> None:
    mine = plugins.Source("/gone/mine.py", "def score(): ...")
    plugins.carry(mine)
    registers = "from mindspeed_rlxf.rewards.rules import register_rule\n"
    plugin = plugins.Source("/gone/rules.py", registers + "register_rule('own')(lambda a, b: 0)\n")
    plugins.load(plugin)
    file = {"function": "/gone/mine.py:score", "sha256": mine.sha256}
    plan = make_plan(reward(file, {"function": "length"}, {"url": "http://h/"}))
    assert [(part.function, source) for part, source in plan.parts] == [
        ("/gone/mine.py:score", mine),
        ("length", None),
    ]
    assert plan.rules == BUILTIN_SOURCES and plan.plugins == ()
    assert make_plan(reward(file, rules={"x": "own"})).plugins == (plugin,)
    assert make_plan(reward({"function": "own"})).plugins == (plugin,)
    assert plan.defaults and not make_plan(reward(file, kind="huggingface")).defaults


def scored(timeout_s: float, *samples: tuple[str, str, str]) -> list[Outcome]:
    """samples: response, ground truth, data source"""
    pool = WorkerPool(make_plan(reward()), 1, timeout_s, memory=4 * 2**30)
    futures = [pool.submit(Sample("", *sample)) for sample in samples]
    found = [future.result(60) for future in futures]
    pool.close()
    return found


def test_rules_score_the_validation_of_a_model_without_functions() -> None:
    """Also slow ones, in processes: no function takes part in such a run."""
    beside_model = reward(kind="huggingface", processes=1)
    assert needs_processes(beside_model, [MATH])
    rewards = StreamingRewards(beside_model)
    outcome = rewards.submit(Sample("", "\\boxed{7}", "7", MATH)).outcome()
    rewards._pool.close()
    assert outcome.result is not None and outcome.result.score == 1.0


def test_an_expression_without_end_is_a_failure_and_no_score() -> None:
    """math-verify's own time-outs are signals, which would be lost here."""
    tower = "9^{" * 6 + "9" + "}" * 6
    (outcome,) = scored(1.0, (f"\\boxed{{{tower}}}", f"8{tower[1:]}", MATH))
    assert outcome.cause is Cause.TIMEOUT
    found = scored(30.0, ("\\boxed{\\frac{2}{4}}", "0.5", MATH), ("#### 4", "4", "gsm8k"))
    assert [outcome.result and outcome.result.score for outcome in found] == [1.0, 1.0]


def test_the_sandbox_is_in_the_plan_where_a_rule_or_a_function_runs_programs() -> None:
    own = {"sandbox": {"memory_mb": 77}}
    assert make_plan(reward(**own)).sandbox is None
    for found in (
        reward(rules={"mine": "code_all"}, **own),
        reward({"function": "gsm8k"}, {"function": "code"}, **own),
    ):
        assert make_plan(found).sandbox == SandboxConfig(memory_mb=77)
        assert needs_processes(found, ["mine"])


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
