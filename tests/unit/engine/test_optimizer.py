"""The learning rate of each iteration, whatever the number of optimizer steps in it."""

from types import SimpleNamespace
from typing import Any

import pytest

from mindspeed_rlxf.config.schema import OptimizerConfig
from mindspeed_rlxf.engine.build import build_scheduler
from mindspeed_rlxf.engine.engine import MegatronEngine

ITERATIONS = 10


def rates(**keys: Any) -> list[float]:
    """What `end_iteration` reports, iteration after iteration."""
    config = OptimizerConfig(lr=1.0, **keys)
    optimizer: Any = SimpleNamespace(param_groups=[{"lr": -1.0, "weight_decay": 0.0}])
    scheduler = build_scheduler(config, optimizer, ITERATIONS)
    engine: Any = SimpleNamespace(optimizer=optimizer, scheduler=scheduler, models=[])
    return [MegatronEngine.end_iteration(engine) for _ in range(ITERATIONS)]


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        ({}, [1.0] * 10),
        ({"lr_decay_style": "linear"}, [1.0, 0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3, 0.2, 0.1]),
        # two iterations up, eight down from 1 to 0.2
        (
            {"lr_decay_style": "linear", "lr_warmup_fraction": 0.2, "min_lr": 0.2},
            [0.0, 0.5, 1.0, 0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3],
        ),
    ],
)
def test_warm_up_and_decay_are_counted_in_iterations(
    keys: dict[str, Any], expected: list[float]
) -> None:
    assert rates(**keys) == pytest.approx(expected)
