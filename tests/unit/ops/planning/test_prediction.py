"""Predicted times: counts by hand, fitted costs, files of calibrations, what is refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mindspeed_rlxf.config.enums import DeviceKind
from mindspeed_rlxf.config.errors import UserError
from mindspeed_rlxf.config.resolve import resolve
from mindspeed_rlxf.config.schema import RunConfig
from mindspeed_rlxf.ops.planning import calibration
from mindspeed_rlxf.ops.planning.calibrate import Measured, fit_costs
from mindspeed_rlxf.ops.planning.calibration import (
    Calibration,
    default_file,
    read_calibration,
    write_calibration,
)
from mindspeed_rlxf.ops.planning.devices import TABLE
from mindspeed_rlxf.ops.planning.fitting import fit
from mindspeed_rlxf.ops.planning.plan import plan
from mindspeed_rlxf.ops.planning.prediction import find_rates, predict, show_prediction
from mindspeed_rlxf.ops.planning.rates import Costs, Rates
from mindspeed_rlxf.ops.planning.work import Kind, generation_work, iteration_work

Make = Callable[..., RunConfig]
NPU = {"device.kind": "npu", "device.memory_gib": 64, "runtime.address": "head:6379"}
BY_HAND = {"actor_rollout.num_samples_per_step": 3, "resource_pool.main": 1}


@pytest.fixture
def config(make_tree: Callable[..., Any]) -> Make:
    return lambda changes=None: resolve(make_tree(changes or {}), "test")


@pytest.fixture(autouse=True)
def own_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def work(config: RunConfig) -> dict[str, Any]:
    return {phase.name: phase.work for phase in iteration_work(config)}


def test_matrices_and_attention_are_counted_as_by_hand(config: Make) -> None:
    # 96 samples of 8 + 16 tokens, width 64, 8 heads of 8 with 4 groups, MLP 96, 4 layers, one rank
    tokens, width, queries, keys, ffn = 96 * 24, 64, 64, 32, 96
    layer = 2 * tokens * (width * 2 * queries + width * 2 * keys + 3 * width * ffn)
    attention = 4 * tokens * 12 * queries
    head = 2 * 96 * 16 * width * 32
    found = work(config(BY_HAND))
    assert found["old_log_prob"].flop == 4 * (layer + attention) + head
    # the score head is one row; an update is three passes, of the head too in short chunks
    assert found["values"].flop == 4 * (layer + attention) + 2 * 96 * 16 * width
    assert found["update_actor"].flop == 3 * found["old_log_prob"].flop


def test_decoding_takes_as_many_steps_as_rounds_of_rows_need(config: Make) -> None:
    # 96 rows, 3 at a time: 32 rounds of 16 steps, and as many prefills; 4 layers and the head
    assert generation_work(config(BY_HAND)).calls == (32 * 16 + 32) * 5
    short = {**BY_HAND, "plan.response_tokens": 8}
    assert generation_work(config(short)).calls == (32 * 8 + 32) * 5


@pytest.mark.parametrize(
    ("change", "more", "less"),
    [
        ({"actor_rollout.recompute": "full"}, "flop", None),
        ({"actor_rollout.recompute": "selective"}, "flop", None),
        ({"actor_rollout.ppo_epochs": 2}, "flop", None),
        ({"actor_rollout.offload.optimizer": True}, "host", None),
        ({"actor_rollout.micro_batch_size": 2}, None, "calls"),
        ({"actor_rollout.tensor_model_parallel_size": 2}, "link", None),
        (
            {
                "actor_rollout.tensor_model_parallel_size": 8,
                "resource_pool.main": [4, 4],
                "resource_pool.tensor_parallel_spans_nodes": True,
                "model.small.num_query_groups": 8,
            },
            "network",
            None,
        ),
    ],
)
def test_a_key_changes_the_work_of_an_update(
    config: Make, change: dict[str, Any], more: str | None, less: str | None
) -> None:
    before, after = (work(config({**NPU, **c}))["update_actor"] for c in ({}, change))
    if more:
        assert getattr(after, more) > getattr(before, more)
    if less:
        assert getattr(after, less) < getattr(before, less)


def test_pools_work_at_the_same_time_and_roles_of_a_pool_one_after_the_other(config: Make) -> None:
    rates = Rates(dict.fromkeys(Kind, Costs(0, 0, 0, 1.0)), 0, 0, 0, 0, 0.5, "")
    together = {"resource_pool.main": 8}
    apart = {"resource_pool.other": 8, "placement.critic": "other"}
    # gen; old_log_prob, ref, values; update_critic, update_actor; each a second
    assert predict(config({**NPU, **together}), rates).iteration_s == 0.5 + 1 + 3 + 2
    assert predict(config({**NPU, **apart}), rates).iteration_s == 0.5 + 1 + 2 + 1


def test_the_table_shows_shares_and_what_they_are_based_on(config: Make) -> None:
    run = config({**NPU, "plan.device": "ascend-910b2"})
    text = show_prediction(run, find_rates(run))
    shares = [int(line.split()[-1][:-1]) for line in text.splitlines() if line.endswith("%")]
    assert len(shares) == 6 and 97 <= sum(shares) <= 103
    assert "predicted: " in text and "published figures of ascend-910b2 (" in text
    assert all(row.source and row.bf16_tflops > 0 for row in TABLE.values())


def test_costs_that_made_the_seconds_are_found_and_none_is_negative() -> None:
    counts = np.array([[1.0, 2, 1], [4, 1, 1], [2, 8, 1], [9, 3, 1]]) * 1e9
    found, error = fit(counts, counts @ np.array([2e-9, 0, 3e-9]))
    assert found == pytest.approx([2e-9, 0, 3e-9], rel=1e-6, abs=1e-14)
    assert error < 1e-6
    found, _ = fit(np.array([[1.0, 1], [2, 1], [3, 1]]), np.array([3.0, 2.0, 1.0]))
    assert min(found) >= 0


def measured(config: Make) -> list[Measured]:
    """Runs of 2e-9 s a FLOP, 1 ms beside but for generation, 0.25 s outside of phases."""
    runs = []
    for response in (2, 4, 8, 16):
        run = config({**BY_HAND, "actor_rollout.max_new_tokens": response})
        seconds = {
            p.name: 2e-9 * p.work.flop + (0 if p.kind is Kind.GENERATE else 1e-3)
            for p in iteration_work(run)
        }
        runs.append(Measured(run, {**seconds, "all": sum(seconds.values()) + 0.25}))
    return runs


def test_a_calibration_predicts_the_runs_that_it_was_fitted_to(
    config: Make, tmp_path: Path
) -> None:
    runs = measured(config)
    made = fit_costs(runs, DeviceKind.CPU, 1)
    assert made.worst < 1e-6 and made.iteration_s == pytest.approx(0.25)
    file = tmp_path / "a" / "rates.json"
    write_calibration(file, made)
    assert read_calibration(file, DeviceKind.CPU, 1, False) == made
    run = config({**BY_HAND, "plan.calibration": str(file)})
    text = plan(run).text
    assert f"based on: measured on {made.device} on {made.date} in fp32 with 1 threads" in text
    rates = find_rates(run).rates
    assert rates is not None
    for each in runs:
        assert predict(each.config, rates).iteration_s == pytest.approx(each.seconds["all"])


def test_without_a_calibration_a_cpu_has_no_prediction(config: Make) -> None:
    assert "no rates are known of a cpu; measure them with" in plan(config()).text


def test_the_users_calibration_is_found_and_a_stale_one_is_named(config: Make) -> None:
    made = fit_costs(measured(config), DeviceKind.CPU, 1)
    write_calibration(default_file(DeviceKind.CPU), made)
    assert "measured on " in plan(config(BY_HAND)).text
    stale = made.model_copy(update={"torch": "1.0"})
    write_calibration(default_file(DeviceKind.CPU), stale)
    text = plan(config(BY_HAND)).text
    assert "no rates are known" in text
    assert "must be of this host and run: its version of torch is 1.0, here it is " in text


@pytest.mark.parametrize(
    ("change", "rule"),
    [
        ({"device": "another"}, "its device is another, here it is "),
        ({"threads": 7}, "its device.cpu_threads is 7, here it is 1"),
        ({"kind": "npu"}, "its kind of device is npu, here it is cpu"),
        ({"bf16": True}, "its bf16 is True, here it is False"),
        ({"version": 0}, "its form is 0, here it is 1"),
        ({"costs": {}}, "must hold costs of forward, update, generate"),
        ({"threads": "x"}, "must be a file of `doctor --calibrate`: "),
        ({"more": 1}, "must be a file of `doctor --calibrate`: "),
        (None, "must be a file of `doctor --calibrate`: "),
    ],
)
def test_a_calibration_of_elsewhere_is_a_problem_with_a_remedy(
    config: Make, tmp_path: Path, change: dict[str, Any] | None, rule: str
) -> None:
    file = tmp_path / "rates.json"
    if change is not None:
        made = fit_costs(measured(config), DeviceKind.CPU, 1)
        file.write_text(json.dumps({**json.loads(made.model_dump_json()), **change}))
    (problem,) = (
        each
        for each in plan(config({**BY_HAND, "plan.calibration": str(file)})).problems
        if each.key.startswith("plan.calibration=")
    )
    assert rule in str(problem)
    assert str(problem).endswith("; run `mindspeed-rlxf doctor --calibrate` on this host")


@pytest.mark.parametrize(
    ("name", "rule"),
    [
        ("ascend-1", "must be one of ascend-910b2, "),
        ("h100", "must be a device of device.kind=npu; there are: ascend-910b2, "),
    ],
)
def test_a_device_that_the_table_lacks_is_a_problem(config: Make, name: str, rule: str) -> None:
    (problem,) = plan(config({**NPU, "plan.device": name})).problems
    assert str(problem).startswith(f"plan.device={name} {rule}")


def test_a_calibration_needs_no_device_of_its_kind_here(
    config: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The head of a cluster may have none."""
    monkeypatch.setattr(calibration, "device_name", lambda kind: None)
    made = fit_costs(measured(config), DeviceKind.CPU, 1)
    other = made.model_copy(update={"kind": DeviceKind.NPU, "bf16": True, "device": "910B3"})
    write_calibration(tmp_path / "npu.json", other)
    found = read_calibration(tmp_path / "npu.json", DeviceKind.NPU, 1, True)
    assert isinstance(found, Calibration)
    with pytest.raises(UserError, match="its bf16 is True"):
        read_calibration(tmp_path / "npu.json", DeviceKind.NPU, 1, False)
