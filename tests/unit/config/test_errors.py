"""Problems: their text, the keys that they name, and how keys are renamed in them."""

from collections.abc import Callable

import pytest

from mindspeed_rlxf.config.enums import OldLogProbs
from mindspeed_rlxf.config.problems import Problem, UserError, ref

Problems = Callable[..., list[str]]


@pytest.mark.parametrize(
    ("problem", "line"),
    [
        (Problem("a.b", "must be 2", 3, "use 2"), "a.b=3 must be 2; use 2"),
        (Problem("a.b", "must be 2", OldLogProbs.ROLLOUT), "a.b=rollout must be 2"),
        (
            Problem("f.jsonl:3", "no row", remedy="mend it", colon=True),
            "f.jsonl:3: no row; mend it",
        ),
        (Problem("a", f"needs {ref('b')}=1", 2, f"drop {ref('b')}"), "a=2 needs b=1; drop b"),
    ],
)
def test_a_problem_is_one_line(problem: Problem, line: str) -> None:
    assert str(problem) == line
    assert str(UserError([problem, problem])) == f"{line}\n{line}"


def test_keys_are_renamed_wherever_they_stand() -> None:
    problem = Problem("a", f"needs {ref('b')}=b", 1, f"use {ref('a')}=2")
    renamed = problem.rename_keys({"a": "old.a", "b": "old.b"}.__getitem__)
    assert str(renamed) == "old.a=1 needs old.b=b; use old.a=2"


def test_keys_are_named_where_the_user_wrote_them(problems: Problems) -> None:
    within = {"training.min_lr": 1.0, "training.lr_decay_style": "cosine"}
    line = "training.min_lr=1 must be at most actor_rollout.lr=0.0001; use 0.0001 or less"
    assert line in problems(within)
    (across,) = problems({"training.max_tokens_per_micro_batch": 23})  # of three roles
    assert across.startswith("training.max_tokens_per_micro_batch=23 must be at least training.se")
