"""The schema states defaults of the old toolkit and describes each key."""

import pickle
from collections.abc import Callable
from typing import Any

import pytest
from pydantic import BaseModel

from mindspeed_rlxf.config import roles, sections
from mindspeed_rlxf.config.enums import Role
from mindspeed_rlxf.config.fields import Section
from mindspeed_rlxf.config.load import resolve
from mindspeed_rlxf.config.problems import ConfigError, Problem, UserError
from mindspeed_rlxf.config.rank_layout import ParallelLayout
from mindspeed_rlxf.config.schema import RunConfig


def all_sections() -> list[type[BaseModel]]:
    found = [value for module in (roles, sections) for value in vars(module).values()]
    return [
        RunConfig,
        *(v for v in found if isinstance(v, type) and issubclass(v, Section) and v is not Section),
    ]


@pytest.mark.parametrize("section", all_sections(), ids=lambda section: section.__name__)
def test_every_key_says_what_it_is_and_whether_resume_may_change_it(
    section: type[BaseModel],
) -> None:
    for name, field in section.model_fields.items():
        assert field.description, f"{section.__name__}.{name} has no description"
        extra = field.json_schema_extra
        assert isinstance(extra, dict) and extra["resume"] in ("fixed", "reshard", "free"), name


def test_run_config_answers_where_roles_live(make_tree: Callable[..., Any]) -> None:
    tree = make_tree(
        {"resource_pool": {"main": [4, 4], "judge": 2}, "placement.critic": "judge",
         "ref.tensor_model_parallel_size": 2, "ref.pipeline_model_parallel_size": 2,
         "actor_rollout.n_samples_per_prompt": 2, "actor_rollout.do_sample": True},
    )  # fmt: skip
    config = resolve(tree, "test")
    assert config.roles_of("main") == [Role.ACTOR_ROLLOUT, Role.REF, Role.REWARD]
    assert config.placement[Role.CRITIC] == "judge"
    assert config.layout(Role.REF) == ParallelLayout(world_size=8, tp=2, pp=2)
    assert config.layout(Role.CRITIC) == ParallelLayout(world_size=2)
    assert config.samples_per_iteration == 192
    assert pickle.loads(pickle.dumps(config)) == config


def test_user_error_keeps_its_problems_across_processes() -> None:
    problems = [Problem("one", "is required"), Problem("two", "must be 2", 3, "use 2")]
    error = pickle.loads(pickle.dumps(ConfigError(problems)))
    assert isinstance(error, UserError) and error.problems == problems
    assert str(error) == "one is required\ntwo=3 must be 2; use 2"
