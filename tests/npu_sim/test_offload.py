"""Four roles need as much memory of a device as planned, whatever they offload.

    python -m tests.npu_sim.test_offload OUTPUT MODE

runs them on one simulated NPU; MODE is a key of MODES. It prints a JSON list: bytes planned,
without those of the process and of HCCL, and the measured peak.
"""

import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from mindspeed_rlxf.cluster.local import LocalRuntime, claim_device
from mindspeed_rlxf.config.enums import DeviceKind
from mindspeed_rlxf.config.roles import OffloadConfig
from mindspeed_rlxf.config.schema import DeviceConfig, RunConfig
from tests.npu_sim.processes import environment
from tests.processes import ROOT

pytestmark = pytest.mark.long
MIB = 1024**2
SHAPE = {
    "num_layers": 4, "hidden_size": 256, "ffn_hidden_size": 768, "num_attention_heads": 8,
    "num_query_groups": 8, "vocab_size": 4096,
}  # fmt: skip
# mode -> (offload weights, offload optimizer, further keys of every role)
MODES: dict[str, tuple[bool, bool, dict[str, Any]]] = {
    "nothing": (False, False, {}), "weights": (True, False, {}), "optimizer": (False, True, {}),
    "both": (True, True, {}), "both bf16": (True, True, {"bf16": True}),
}  # fmt: skip


def configured(out: Path, mode: str) -> tuple[RunConfig, Any]:
    from tests.distributed.llamas import PLAIN, make_models, with_local_runtime
    from tests.distributed.test_layout_invariance import fixed_run

    weights, optimizer, layout = MODES[mode]
    shape = PLAIN.model_copy(update=SHAPE)
    frozen = {"offload": OffloadConfig(weights=weights)}
    learns = {"offload": OffloadConfig(weights=weights, optimizer=optimizer)}
    sections = {
        "training": {"train_iters": 2, "save_interval": 1}, "ref": frozen, "reward": frozen,
        "actor_rollout": {**learns, "num_samples_per_step": 4}, "critic": learns,
    }  # fmt: skip
    folder = make_models(out / "models", shape)
    config, prepared = fixed_run(folder, out / "run", shape, 1, layout, sections)
    device = DeviceConfig(kind=DeviceKind.NPU)
    return with_local_runtime(config).model_copy(update={"device": device}), prepared


def planned(config: RunConfig) -> int:
    from mindspeed_rlxf.ops.planning.memory import pool_memory

    pool = pool_memory(config, "main")
    return pool.total - pool.process - sum(role.other for role in pool.roles)


def main(out: Path, mode: str) -> None:
    claim_device(DeviceKind.NPU, 1, 300.0)  # before the imports, which bring in Megatron
    import torch

    from mindspeed_rlxf import device
    from mindspeed_rlxf.checkpoint.directory import RunDirectory
    from tests.training import train

    config, prepared = configured(out, mode)
    runtime = LocalRuntime(DeviceKind.NPU, timeout_s=300.0)
    directory = runtime.from_first(lambda: RunDirectory.create(config))
    torch.npu.reset_peak_memory_stats()
    device.reset_peak_memory = lambda: None  # keep the peak of the whole run
    train(config, prepared, directory, runtime)
    print(json.dumps([planned(config), torch.npu.max_memory_allocated()]))
    runtime.shutdown()


def start(out: Path, mode: str, **variables: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "tests.npu_sim.test_offload", str(out), mode],
        cwd=ROOT, env=environment(out, 1, RLXF_SIM_DELAYED="1", **variables),
        capture_output=True, text=True, timeout=900,
    )  # fmt: skip


@pytest.mark.parametrize("mode", MODES)
def test_a_run_takes_what_the_plan_says(simulated, tmp_path, mode):
    done = start(tmp_path, mode)
    assert done.returncode == 0, done.stderr[-4000:]
    planned, peak = json.loads(done.stdout.splitlines()[-1])
    assert peak == pytest.approx(planned, rel=0.1)


def test_the_plans_memory_is_enough_and_less_is_not(simulated, tmp_path):
    (tmp_path / "measured").mkdir()
    planned, _ = json.loads(start(tmp_path / "measured", "both").stdout.splitlines()[-1])
    for factor, ends in ((1.1, True), (0.85, False)):
        out = tmp_path / f"{factor}"
        out.mkdir()
        limit = math.floor(planned * factor / MIB)
        done = start(out, "both", RLXF_SIM_MEMORY_MIB=str(limit))
        assert (done.returncode == 0) is ends, done.stderr[-4000:]
        if not ends:
            assert "NPU out of memory. Tried to allocate" in done.stderr


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
