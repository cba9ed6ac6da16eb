"""Python files of the user are loaded once, stored as text, and their errors named by line."""

import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from mindspeed_rlxf.algorithms.estimators import AdvantageInputs
from mindspeed_rlxf.algorithms.losses import POLICY_LOSSES, ClipRange
from mindspeed_rlxf.checkpoint.directory import find_changes
from mindspeed_rlxf.config.enums import Role
from mindspeed_rlxf.config.keys import to_tree
from mindspeed_rlxf.config.load import resolve
from mindspeed_rlxf.config.problems import ConfigError
from mindspeed_rlxf.data.files import count_rows, read_rows
from mindspeed_rlxf.rewards.rules import RULES, RewardResult
from mindspeed_rlxf.roles.critic import CriticRole
from mindspeed_rlxf.roles.objectives import make_objective
from mindspeed_rlxf.roles.own_roles import role_factory
from mindspeed_rlxf.roles.reward import RewardRole
from tests.registries import restored_registries

pytestmark = pytest.mark.usefixtures("registries")
RULE = """
from mindspeed_rlxf.rewards.rules import RewardResult, register_rule

@register_rule("short")
def short(response, ground_truth):
    return RewardResult(1.0 / len(response))
"""
ESTIMATOR = """
from mindspeed_rlxf.algorithms.estimators import Advantages, register_estimator
from mindspeed_rlxf.config.estimator_traits import EstimatorTraits

@register_estimator("sum", EstimatorTraits(compares_group={}, whitens=True))
def total(inputs):
    return Advantages(inputs.rewards.sum(1)[:, None] * inputs.trained_mask)
"""


def written(folder: Path, text: str) -> str:
    file = folder / "parts.py"
    file.write_text(text, encoding="utf-8")
    return str(file)


def test_a_file_is_loaded_once_and_remembered_by_its_text(make_tree, tmp_path):
    file = written(tmp_path, RULE)
    for given in (file, [file], [{"file": file}]):
        config = resolve(make_tree({"training.plugins": given}), "test")
        assert RULES["short"]("four", "") == RewardResult(0.25)
    tree = to_tree(config)
    assert resolve(tree, "test") == config
    written(tmp_path, RULE + "\n")
    with pytest.raises(ConfigError, match="must be the file of sha256"):
        resolve(tree, "test")
    RULES.pop("short")
    (change,) = find_changes(
        tree, to_tree(resolve(make_tree({"training.plugins": [file]}), "test"))
    )
    assert (change.key, change.rule) == ("training.plugins", "fixed")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("x = (", "(parts.py, line 1)"),
        ("x = 1\0", " while loading: source code string cannot contain null bytes"),
        ("import json\n\nx = 1 / 0", "ZeroDivisionError in line 3: division by zero"),
        ("import sys\nsys.exit(3)", "SystemExit in line 2: 3"),
        (RULE.replace("short", "gsm8k"), "'gsm8k' is registered already; use a name other than"),
        (None, "must be a Python file that can be read: No such file or directory"),
    ],
)
def test_a_file_that_cannot_be_loaded_is_the_users_mistake(make_tree, tmp_path, text, said):
    file = str(tmp_path / "none.py") if text is None else written(tmp_path, text)
    with pytest.raises(ConfigError) as found:
        resolve(make_tree({"training.plugins": [file]}), "test")
    problem, *others = found.value.problems
    assert bool(others) == (text is None), "the other missing files"
    assert str(problem).startswith(f"training.plugins={file} must ")
    assert said in str(problem)
    assert not [name for name in sys.modules if name.startswith("rlxf_plugin_parts")]


def test_rules_read_what_an_estimator_needs(make_tree, tmp_path):
    def found(compares: bool, **more: Any) -> list[str]:
        with restored_registries():
            grpo = {"training.stage": "ray_grpo", "algorithm.adv_estimator": "sum", **more}
            grpo["training.plugins"] = written(tmp_path, ESTIMATOR.format(compares))
            try:
                config = resolve(make_tree(grpo, ("critic", "placement.critic")), "test")
            except ConfigError as error:
                return [str(problem) for problem in error.problems]
            return [config.algorithm.advantage_whiten.value, config.algorithm.kl_in]

    assert found(False) == ["batch", "reward"]
    (problem,) = found(True)
    assert "must be 2 or more with algorithm.adv_estimator=sum" in problem
    (problem,) = found(False, **{"algorithm.adv_estimator": "sums"})
    assert problem.endswith("did you mean sum?")


MORE_PARTS = str(Path(__file__).parents[3] / "examples" / "plugins" / "more_parts.py")
GROUPS = {
    "training.plugins": MORE_PARTS, "training.stage": "ray_grpo",
    "actor_rollout.n_samples_per_prompt": 2, "algorithm.objective": "best_of_group",
    "actor_rollout.policy_loss": "soft_clip", "reward.kind": "role", "placement.reward": "main",
}  # fmt: skip


def test_more_parts_are_chosen_by_their_names(make_tree, tmp_path):
    config = resolve(make_tree(GROUPS, ("critic", "placement.critic")), "test")
    assert resolve(to_tree(config), "test") == config
    mask = torch.ones(2, 3, dtype=torch.bool)
    scores = torch.tensor([1.0, 3.0])
    given = AdvantageInputs(scores, scores[:, None] * mask, mask, mask, None, None, 2, 1.0, 1.0)
    found = make_objective(config, lambda total: total).estimate(given)  # z-scores -0.7 and 0.7
    torch.testing.assert_close(found.advantages, torch.tensor([[0.0], [0.5**0.5]]).expand(2, 3))

    ratio, advantages = torch.tensor([1.0, 1.2]), torch.tensor([2.0, 2.0])
    clip, lengths = ClipRange(0.2, 0.2), torch.tensor([2])
    loss = POLICY_LOSSES["soft_clip"](ratio.log(), torch.zeros(2), advantages, clip, lengths)
    weight = torch.tensor([1.0, 0.36787944])  # exp(-0) and exp(-1)
    torch.testing.assert_close(loss.loss, -advantages * ratio * weight)
    assert loss.clipped.tolist() == [False, True]

    (tmp_path / "some.sums").write_text('{"first": 10, "last": 12}')
    rows = [row for _, row in read_rows(str(tmp_path / "some.sums"))]
    assert [row["prompt"] for row in rows] == ["10+10=", "11+11=", "12+12="]
    assert count_rows(str(tmp_path / "some.sums")) == 3
    assert role_factory(Role.REWARD, RewardRole) is not RewardRole
    assert role_factory(Role.CRITIC, CriticRole) is CriticRole


@pytest.mark.parametrize(
    ("key", "said"),
    [
        ("algorithm.objective", "did you mean best_of_group?"),
        ("actor_rollout.policy_loss", "did you mean soft_clip?"),
    ],
)
def test_a_misspelt_part_is_an_error_with_the_nearest_name(make_tree, key, said):
    tree = make_tree({**GROUPS, key: f"{GROUPS[key]}s"}, ("critic", "placement.critic"))
    with pytest.raises(ConfigError, match=said.replace("?", r"\?")):
        resolve(tree, "test")
