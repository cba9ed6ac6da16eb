"""Reward functions of the user are found, run and checked when the configuration is resolved."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mindspeed_rlxf.checkpoint.directory import RunDirectory, find_changes
from mindspeed_rlxf.config import plugins
from mindspeed_rlxf.config.keys import to_tree
from mindspeed_rlxf.config.load import resolve
from mindspeed_rlxf.config.problems import ConfigError
from mindspeed_rlxf.rewards.outcome import Sample
from mindspeed_rlxf.rewards.scoring import Plan, SampleScorer

MakeTree = Callable[..., dict[str, Any]]
pytestmark = pytest.mark.usefixtures("registries")

TEXT = """
def score(prompt, response, ground_truth, extra_info, scale=1.0):
    return scale * (response == ground_truth)

async def later(prompt, response, ground_truth, extra_info, data_source):
    return {"score": 1.0}

class Judge:
    @staticmethod
    def judge(**given):
        return 0.5

def two(response, ground_truth):
    return 0.0

def compute_score(data_source, solution_str, ground_truth, extra_info=None, strict=False):
    return {"score": float(solution_str == ground_truth), "acc": float(data_source == "a")}

number = 3
"""


@pytest.fixture
def file(tmp_path: Path) -> str:
    path = tmp_path / "mine.py"
    path.write_text(TEXT, encoding="utf-8")
    return str(path)


def problems(make_tree: MakeTree, changes: dict[str, Any]) -> list[str]:
    with pytest.raises(ConfigError) as error:
        resolve(make_tree(changes), "test")
    return [str(problem) for problem in error.value.problems]


def test_a_function_stands_in_the_configuration_with_its_file_and_hash(make_tree, file):
    config = resolve(make_tree({"reward.function": f"{file}:score"}), "test")
    (part,) = config.reward.scoring_functions
    assert (part.name, part.function, part.weight) == ("score", f"{file}:score", 1.0)
    assert part.sha256 == plugins.Source(file, TEXT).sha256
    assert resolve(to_tree(config), "test") == config


def test_a_function_of_verl_is_called_as_verl_does(make_tree, file):
    given = {"function": f"{file}:compute_score", "arguments": {"strict": True}}
    (part,) = resolve(make_tree({"reward.function": given}), "test").reward.scoring_functions
    scorer = SampleScorer(Plan(((part, plugins.Source(file, TEXT)),), {}))
    result = scorer.score(Sample("1+1=", "2", "2", "a", {"level": 3}))
    assert (result.score, result.parts["compute_score/acc"]) == (1.0, 1.0)


def test_several_functions_have_names_weights_arguments_and_data_sources(make_tree, file):
    given = [
        {"function": f"{file}:score", "weight": 2.0, "arguments": {"scale": 0.5}},
        {"function": f"{file}:later", "name": "async", "data_sources": ["a"]},
        f"{file}:Judge.judge",
        "gsm8k",
        {"url": "http://127.0.0.1:1/score", "batch_size": 4},
    ]
    config = resolve(make_tree({"reward.functions": given}), "test")
    names = [part.name for part in config.reward.scoring_functions]
    assert names == ["score", "async", "Judge.judge", "gsm8k", "remote"]
    assert config.reward.scoring_functions[0].arguments == {"scale": 0.5}
    assert config.reward.scoring_functions[1].applies_to(
        "a"
    ) and not config.reward.scoring_functions[1].applies_to("b")
    assert resolve(to_tree(config), "test") == config


@pytest.mark.parametrize(
    ("function", "said"),
    [
        ("{file}:scores", "must have a function scores, and no class; it has score, later, two"),
        ("{file}:number", "must have a function number"),
        ("{file}:Judge", "must have a function Judge, and no class"),
        ("{file}", "must name a function, as file.py:name"),
        ("{file}:two", "must be a function of (prompt, response, ground_truth, extra_info)"),
        ({"function": "{file}:score", "arguments": {"size": 1}}, "unexpected keyword argument"),
        ({"function": "{file}:score", "arguments": {"prompt": 1}}, "arguments must not have"),
        ({"function": "{file}:score", "arguments": {1: 2}}, "keywords must be strings"),
        ("/nowhere/x.py:score", "must be a Python file that can be read: No such file"),
        ({"function": "{file}:score", "sha256": "0" * 64}, "must be the file of sha256 000"),
        ({"url": "ftp://host/"}, "must begin with http:// or https://"),
        ({"function": "gsm8k", "url": "http://h/"}, "must be given"),
        ({"function": "gsm8k", "name": "failed_often"}, "not begin with failed or model"),
        ({"function": "gsm8k", "wieght": 2}, "unknown key"),
        (7, "=7 must be"),
    ],
)
def test_a_function_that_cannot_be_called_is_the_users_mistake(make_tree, file, function, said):
    given = function
    if isinstance(function, dict):
        given = {k: v.format(file=file) if k == "function" else v for k, v in function.items()}
    elif isinstance(function, str):
        given = function.format(file=file)
    for key, value in (("function", given), ("functions", [given])):
        problem, *missing = problems(make_tree, {f"reward.{key}": value})
        assert all("must exist" in line for line in missing)
        assert said in problem and problem.startswith(f"reward.{key}")


def test_functions_that_exclude_each_other_are_refused(make_tree, file):
    one, two = f"{file}:score", f"{file}:later"
    (problem,) = problems(make_tree, {"reward.function": one, "reward.functions": [two]})
    assert "must not stand beside" in problem
    (problem,) = problems(make_tree, {"reward.functions": [one, one]})
    assert "must each have a name of its own, score is there twice" in problem
    (problem,) = problems(make_tree, {"reward.function": one, "reward.verifier": True})
    assert "reward.verifier" in problem


def test_a_changed_text_is_another_run_unless_it_is_allowed(make_tree, file, tmp_path):
    """The key is `allow_changed_function`."""
    for key in ("function", "functions"):
        given = {f"reward.{key}": f"{file}:score", "training.output_dir": str(tmp_path / key)}
        Path(file).write_text(TEXT, encoding="utf-8")
        before = resolve(make_tree(given), "test")
        RunDirectory.create(before).unlock()
        Path(file).write_text(TEXT + "\n", encoding="utf-8")
        (problem,) = RunDirectory.check(resolve(make_tree(given), "test"))
        changed = f"of reward.{key}" if key == "function" else file
        assert f"the file {changed} has changed" in str(problem)
        assert "reward.allow_changed_function=true to go on with the new text" in str(problem)
        allowed = {**given, "reward.allow_changed_function": True}
        assert RunDirectory.check(resolve(make_tree(allowed), "test")) == []
        # another weight is still another run
        entry = {"function": f"{file}:score", "weight": 2.0}
        other = resolve(make_tree({**allowed, f"reward.{key}": entry}), "test")
        (problem,) = RunDirectory.check(other)
        assert "weight" in str(problem) and "allow_changed_function" not in problem.remedy
    changed = find_changes(to_tree(before), to_tree(resolve(make_tree(given), "test")))
    assert [(change.key, change.rule) for change in changed] == [("reward.functions", "fixed")]
