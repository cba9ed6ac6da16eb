"""Overlapping communication with computation changes no number."""

from pathlib import Path
from typing import Any

import pytest
from megatron.core.distributed import DistributedDataParallelConfig

from mindspeed_rlxf.cluster.group import Sharded
from mindspeed_rlxf.config.enums import Role
from mindspeed_rlxf.config.schema import OptimizerConfig
from mindspeed_rlxf.data.batch import RoleOutput
from mindspeed_rlxf.engine import build
from mindspeed_rlxf.roles.actor import ActorRole
from tests.distributed.groups import build_group, split_evenly
from tests.distributed.llamas import MIXTRAL, PLAIN, make_pair, run_config
from tests.distributed.samples import make_experience, make_rollouts

SHARDED = OptimizerConfig(lr=1e-3, use_distributed_optimizer=True)
OVERLAPPED = SHARDED.model_copy(update={"overlap_grad_reduce": True, "overlap_param_gather": True})


class SmallBuckets(ActorRole):
    """An actor whose head has a bucket of its own, as the head of a large model has."""

    bucket_size = 1000

    def __init__(self, *arguments: Any) -> None:
        def small(**settings: Any) -> DistributedDataParallelConfig:
            return DistributedDataParallelConfig(bucket_size=self.bucket_size, **settings)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(build, "DistributedDataParallelConfig", small)
            super().__init__(*arguments)

    def buckets(self) -> RoleOutput:
        """Report for each bucket whether it holds the weight of the head alone."""
        head = self.engine.module.output_weight  # type: ignore[attr-defined]
        groups = self.engine.models[0].bucket_groups  # type: ignore[attr-defined]
        return RoleOutput(report=[group.params == {head} for group in groups])


class OwnBuckets(SmallBuckets):
    """An actor with a bucket for each parameter, also for that of each expert."""

    bucket_size = 1


@pytest.mark.parametrize("kind", [SmallBuckets, OwnBuckets], ids=["head", "experts"])
def test_weights_in_buckets_of_their_own_are_read_when_they_are_gathered(
    warm_runtime: Any, tmp_path: Path, kind: type[SmallBuckets]
) -> None:
    """Three steps of an iteration; what is read after them has the gathered weights."""
    architecture = PLAIN if kind is SmallBuckets else MIXTRAL
    lm, scored = make_pair(tmp_path, architecture)
    rollouts = make_rollouts()
    given = split_evenly(rollouts, 2)
    steps = Sharded([[[0, 1], [2, 3], [0, 1, 2, 3]]] * 2)
    found = []
    for optimizer in (SHARDED, OVERLAPPED):
        config = run_config(lm, scored, architecture, pool=2, optimizer=optimizer)
        group = build_group(warm_runtime, config.layout(Role.ACTOR_ROLLOUT), kind, config)
        alone = group.call(kind.buckets).result()[0]
        assert alone[:1] == [optimizer is OVERLAPPED], "without overlap there is one bucket"
        learnt = split_evenly(make_experience(rollouts), 2)
        report = group.call(ActorRole.update_policy, given, learnt, steps).result()[0]
        gaps = [each.gap.total for each in group.call(ActorRole.log_probs, given).result()]
        found.append((report.steps, gaps))
    (plain, before), (overlapped, after) = found
    # A sum over ranks is rounded bucket by bucket; with one for each parameter there are many.
    close = 1e-6 if kind is SmallBuckets else 1e-5
    assert overlapped == [pytest.approx(step, rel=close) for step in plain]
    assert after == pytest.approx(before, rel=close)
