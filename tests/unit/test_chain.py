"""The clipped loss is seven calls from the command, and each call can be followed by its name."""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

from mindspeed_rlxf.algorithms.losses import clipped_policy_loss
from mindspeed_rlxf.cli import train
from mindspeed_rlxf.cluster.role_groups import ActorGroup, CriticGroup
from mindspeed_rlxf.roles.actor import ActorRole
from mindspeed_rlxf.roles.critic import CriticRole
from mindspeed_rlxf.roles.experience import ExperienceMaker
from mindspeed_rlxf.roles.objectives import ClippedObjective
from mindspeed_rlxf.trainer.ppo import PpoTrainer

COMMAND = Path(__file__).parents[2] / "ray_gpt.py"

# Each function, and what it says to reach the next one; the last one reaches the loss.
CHAIN: list[tuple[Callable[..., Any], str]] = [
    (train.main, "trainer.fit"),
    (PpoTrainer.fit, "self.actor.update_policy"),
    (ActorGroup.update_policy, "ActorRole.update_policy"),
    (ActorRole.update_policy, "self.objective.step"),
    (ClippedObjective.step, "self.loss"),
    (ClippedObjective.loss, clipped_policy_loss.__name__),
]

# As CHAIN, to the estimator of the advantages.
TO_THE_ESTIMATOR: list[tuple[Callable[..., Any], str]] = [
    (PpoTrainer.fit, "self._make_experience"),
    (PpoTrainer._make_experience, "(self.critic or self.actor).make_experience"),
    (CriticGroup.make_experience, "CriticRole.make_experience"),
    (ActorGroup.make_experience, "ActorRole.make_experience"),
    (CriticRole.make_experience, "self.experience.make"),
    (ActorRole.make_experience, "self.experience.make"),
    (ExperienceMaker.make, "self.objective.estimate"),
    (ClippedObjective.estimate, "ESTIMATORS"),
]


def said(source: str) -> set[str]:
    """Every name, with its dots, in a piece of code."""
    nodes = ast.walk(ast.parse(textwrap.dedent(source)))
    return {ast.unparse(node) for node in nodes if isinstance(node, (ast.Name, ast.Attribute))}


def test_the_loop_is_the_second_call_and_the_loss_the_seventh() -> None:
    assert "train" in said(COMMAND.read_text(encoding="utf-8"))
    for function, name in CHAIN:
        assert name in said(inspect.getsource(function)), f"{function.__qualname__}: {name}"
    assert 1 + len(CHAIN) == 7 and CHAIN[1][0] is PpoTrainer.fit, "five from the loop"


def test_experience_calls_the_estimator() -> None:
    for function, name in TO_THE_ESTIMATOR:
        assert name in said(inspect.getsource(function)), f"{function.__qualname__}: {name}"
