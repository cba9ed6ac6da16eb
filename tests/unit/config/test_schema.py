"""The schema states defaults of the old toolkit and describes each key."""

import pickle
from collections.abc import Callable
from typing import Any

from mindspeed_rlxf.config.enums import Role
from mindspeed_rlxf.config.load import resolve
from mindspeed_rlxf.config.problems import ConfigError, Problem, UserError
from mindspeed_rlxf.config.rank_layout import ParallelLayout


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
