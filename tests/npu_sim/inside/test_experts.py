"""Megatron's experts copy their sizes to the host asynchronously, and wait for the copies."""

from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from mindspeed_rlxf.device import worlds


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[Any]:
    """A frozen mixture of experts on one device."""
    from mindspeed_rlxf.config.schema import RoleConfig
    from mindspeed_rlxf.engine.engine import MegatronEngine
    from mindspeed_rlxf.models.parameters import Head
    from tests.distributed.llamas import QWEN3_MOE, make_llama

    make_llama(tmp_path, QWEN3_MOE)
    worlds.join("hccl", dist.HashStore(), 0, (1,), timedelta(seconds=60))
    role = RoleConfig(model="test", architecture=QWEN3_MOE, load=str(tmp_path), micro_batch_size=3)
    yield MegatronEngine(role, Head.LANGUAGE_MODEL, seed=1)
    worlds.leave()


def test_experts_wait_for_the_copies_of_their_sizes(engine, device, monkeypatch, put_fault):
    """One wait removed after a copy that does not block."""
    from megatron.core.transformer.moe.token_dispatcher import MoEAlltoAllTokenDispatcher

    from tests.distributed.samples import make_rollouts
    from tests.npu_sim import watch

    rollouts = make_rollouts()
    at_once = engine.log_probs(rollouts, 1.0).log_probs
    for name in watch.HOST_READS:
        monkeypatch.setattr(torch.Tensor, name, getattr(torch.Tensor, name))
    watch.check_host_reads()
    device.set_delayed(True)
    assert torch.equal(engine.log_probs(rollouts, 1.0).log_probs, at_once)
    put_fault(
        MoEAlltoAllTokenDispatcher, "_maybe_dtoh_and_synchronize",
        "self.d2h_event.synchronize()", "pass",
    )  # fmt: skip
    with pytest.raises(RuntimeError, match="reads a copy from npu that has not ended: wait for"):
        engine.log_probs(rollouts, 1.0)
