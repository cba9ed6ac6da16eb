"""Times, skew, memory and idle shares from replies; operations of an iteration by hand."""

from typing import Any
from unittest.mock import MagicMock

import pytest

from mindspeed_rlxf.cluster.group import RoleFuture
from mindspeed_rlxf.cluster.interface import Reply
from mindspeed_rlxf.config.load import resolve
from mindspeed_rlxf.device.peaks import find_peak
from mindspeed_rlxf.engine.flop_counter import Work
from mindspeed_rlxf.roles.reports import GenerateReport
from mindspeed_rlxf.trainer.metrics import (
    done_work,
    generation_flops,
    idle_metrics,
    phase_metrics,
    throughput_metrics,
)
from tests.unit.config.conftest import make_tree, no_cluster

__all__ = ["make_tree", "no_cluster"]
GIB = 1024**3


class Call:
    """A call whose ranks took these seconds. first: rank in the pool"""

    handles = ()

    def __init__(self, *seconds: float, memory: float = 1.0, first: int = 0) -> None:
        replies = [Reply(None, None, s, first + i) for i, s in enumerate(seconds)]
        self.replies = [reply._replace(memory=round(memory * GIB)) for reply in replies]

    def wait(self) -> list[Reply]:
        return self.replies


def pending(pool: str, *seconds: float, **more: Any) -> RoleFuture:
    return RoleFuture(Call(*seconds, **more), [0], [None], pool, "role.method")


def test_a_phase_has_its_time_its_peak_and_its_slowest_rank():
    gen = [pending("main", 1.0, 2.0, 3.0, memory=2.5), pending("main", 1.0, 1.0, 4.0)]
    found = phase_metrics({"gen": gen, "adv": [pending("main", 0.5)]})
    assert found == {
        "timing/gen": 3.0 + 4.0,
        "memory/gen": 2.5,
        "skew/gen": pytest.approx(7.0 / 4.0 - 1.0),  # 2, 3 and 7 s, 4 on average
        "slowest_rank/gen": 2.0,
        "timing/adv": 0.5,
        "memory/adv": 1.0,
    }


def test_a_phase_with_an_earlier_call_has_the_time_of_both():
    """The functions beside a reward model, in another pool; skews are those of the model."""
    model = pending("model", 1.0, 3.0).after(pending("main", 5.0, 6.0))
    found = phase_metrics({"reward": model.with_earlier()})
    assert found["timing/reward"] == 6.0 + 3.0
    assert (found["skew/reward"], found["slowest_rank/reward"]) == (pytest.approx(0.5), 1.0)


def test_the_idle_share_of_a_pool_is_what_its_ranks_did_not_work():
    phases = {"gen": [pending("a", 4.0, 2.0)], "ref": [pending("b", 1.0)]}
    found = idle_metrics(phases, {"a": 2, "b": 1, "c": 3}, 10.0)
    assert found == {"idle/a": pytest.approx(0.7), "idle/b": pytest.approx(0.9), "idle/c": 1.0}
    assert idle_metrics(phases, {"a": 2, "b": 1}, 0.5) == {"idle/a": 0.0, "idle/b": 0.0}


def test_both_parts_of_a_disaggregated_pool_have_their_idle_share():
    phases = {"update_actor": [pending("a", 4.0)], "gen": [pending("a", 5.0, 7.0, first=1)]}
    found = idle_metrics(phases, {"a": 3}, 10.0, {"a": (1, 2)})
    parts = {"idle/a/train": pytest.approx(0.6), "idle/a/rollout": pytest.approx(0.4)}
    assert found == {"idle/a": pytest.approx(14 / 30), **parts}


def report(prompts: list[int], responses: list[int]) -> GenerateReport:
    return GenerateReport(prompts, responses, [], 0, 0, 0, 0.0)


def test_operations_of_generation_and_of_the_passes_that_ranks_report(make_tree):
    """4 layers of width 64, 8 heads of 8, 4 of keys, MLP 96, 32 tokens."""
    config = resolve(make_tree(), "test")
    weights = 2 * 64 * (64 + 32) + 3 * 64 * 96

    def forward(tokens: int, outputs: int) -> int:
        return 4 * (2 * tokens * weights + 2 * 64 * tokens**2) + 2 * outputs * 64 * 32

    expected = forward(6, 2) + forward(8, 6)
    assert generation_flops(config, [report([4, 2], [2, 6])]) == expected
    replies = [Reply(None, None, 1.0, rank, work=Work(3, 10 + rank)) for rank in (0, 1)]
    phases = {"ref": [MagicMock(replies=lambda: replies)], "adv": [MagicMock(replies=list)]}
    assert done_work(phases) == Work(6, 21)


def test_the_share_of_the_peak_is_there_where_the_peak_is_known():
    known, unknown = (
        throughput_metrics([report([4, 6], [1, 9]), report([2], [5])], 9e12, 2.0, 3, peak)
        for peak in (6e12, None)
    )
    assert known == unknown | {"throughput/mfu": 0.25}
    assert unknown == {
        "throughput/tokens_per_s": 13.5,  # 12 + 15 tokens
        "throughput/tokens_per_s_per_device": 4.5,
        "throughput/tflops_per_device": 1.5,
    }


@pytest.mark.parametrize(("name", "tflops"), [
    ("NVIDIA H100 80GB HBM3", 989),
    ("NVIDIA H200", 989),
    ("NVIDIA A100-SXM4-80GB", 312),
    ("Ascend910B3", 294.9),
    ("Ascend910_9392", 376),
    ("NVIDIA H100 PCIe", None),  # clocked lower
    ("NVIDIA H100 NVL", None),
    ("NVIDIA GeForce RTX 4090", None),
    ("", None),
])  # fmt: skip
def test_a_device_is_found_by_its_name(name, tflops):
    assert find_peak(name) == (None if tflops is None else pytest.approx(tflops * 1e12))
