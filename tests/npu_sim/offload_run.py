"""A run with four roles on one simulated NPU, whose memory is compared with the plan: OUT MODE.

Prints one JSON object: bytes planned without those of the process, and the largest use.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from mindspeed_rlxf.cluster.local import LocalRuntime, claim_device
from mindspeed_rlxf.config.enums import DeviceKind
from mindspeed_rlxf.config.roles import OffloadConfig
from mindspeed_rlxf.config.schema import DeviceConfig, RunConfig

MIB = 1024**2
SHAPE = {
    "num_layers": 4, "hidden_size": 256, "ffn_hidden_size": 768, "num_attention_heads": 8,
    "num_query_groups": 8, "vocab_size": 4096,
}  # fmt: skip
# mode -> weights, optimizer, keys of every role
MODES: dict[str, tuple[bool, bool, dict[str, Any]]] = {
    "nothing": (False, False, {}),
    "weights": (True, False, {}),
    "optimizer": (False, True, {}),
    "both": (True, True, {}),
    "both bf16": (True, True, {"bf16": True}),
}


def configured(out: Path, mode: str) -> tuple[RunConfig, Any]:
    """The run of a mode, and its prompts; models are made in `out`."""
    from tests.distributed.llamas import PLAIN, with_local_runtime, make_models
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
    """Bytes of the pool's rank; the simulated device has none of the process and of HCCL."""
    from mindspeed_rlxf.ops.planning.memory import pool_memory

    pool = pool_memory(config, "main")
    return pool.total - pool.process - sum(role.other for role in pool.roles)


def main(out: Path, mode: str) -> None:
    claim_device(DeviceKind.NPU, 1, 300.0)  # before the imports, which bring in Megatron
    import torch

    from mindspeed_rlxf import device
    from mindspeed_rlxf.run.directory import RunDirectory
    from tests.training import train

    config, prepared = configured(out, mode)
    runtime = LocalRuntime(DeviceKind.NPU, timeout_s=300.0)
    directory = runtime.from_first(lambda: RunDirectory.create(config))
    torch.npu.reset_peak_memory_stats()
    device.reset_peak_memory = lambda: None  # of the whole run
    train(config, prepared, directory, runtime)
    print(json.dumps([planned(config), torch.npu.max_memory_allocated()]))
    runtime.shutdown()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
