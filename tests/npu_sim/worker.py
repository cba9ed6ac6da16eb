"""One rank of a compared run, which `run.run_case` starts with the variables of torchrun.

python -m tests.npu_sim.worker KIND MODELS OUTPUT CASE
"""

import collections
import dataclasses
import importlib.util
import json
import os
import sys
from pathlib import Path
from typing import Any

from mindspeed_rlxf.cluster.local import LocalRuntime, claim_device
from mindspeed_rlxf.config.enums import DeviceKind
from tests.npu_sim.cases import CASES, PATHS

TIMEOUT_S = 300.0
calls: collections.Counter[str] = collections.Counter()


def main(kind: DeviceKind, folder: Path, out: Path, name: str) -> None:
    megatron = CASES[name].layout.get("backend") != "fsdp"
    # Before the imports below, which bring in Megatron.
    claim_device(kind, 1, TIMEOUT_S, megatron)
    if kind is DeviceKind.NPU:
        count_operators()
    from mindspeed_rlxf.checkpoint.directory import RunDirectory
    from mindspeed_rlxf.config.schema import DeviceConfig
    from tests.distributed import llamas
    from tests.distributed.test_layout_invariance import fixed_run
    from tests.training import train

    case = CASES[name]
    runtime = LocalRuntime(kind, timeout_s=TIMEOUT_S, megatron=megatron)
    config, prepared = fixed_run(
        folder, out, getattr(llamas, case.architecture), case.ranks, case.layout, case.sections
    )
    config = llamas.with_local_runtime(config)
    config = config.model_copy(update={"device": DeviceConfig(kind=kind)})
    if not megatron:
        rollout = config.rollout.model_copy(update={"engine": "transformers"})
        config = config.model_copy(update={"rollout": rollout})
    if case.generates:
        prepared = dataclasses.replace(prepared, fixed_responses=None)
    directory = runtime.from_first(lambda: RunDirectory.create(config))
    passes = record_forward_passes(megatron)
    train(config, prepared, directory, runtime, writes=runtime.is_first)
    write(out, runtime.rank, passes)
    runtime.shutdown()


def count_operators() -> None:
    """Count calls of torch_npu's operators and of PATHS: one that nobody calls is not rehearsed."""
    import torch_npu

    def counted(name: str, operator: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            calls[name] += 1
            return operator(*args, **kwargs)

        return call

    for name in torch_npu.__all__:
        if name.startswith("npu_"):
            setattr(torch_npu, name, counted(name, getattr(torch_npu, name)))
    if importlib.util.find_spec("mindspeed.core") is None:
        return  # the small adaptor of the simulated device has none of PATHS
    for path, (module_name, name) in PATHS.items():
        module = importlib.import_module(module_name)
        setattr(module, name, counted(path, getattr(module, name)))


def record_forward_passes(megatron: bool) -> list[list[float]]:
    """Append what each forward pass of an engine returns to the list."""
    if megatron:
        from mindspeed_rlxf.engine.engine import MegatronEngine as Engine
    else:
        from mindspeed_rlxf.engine.fsdp.engine import FsdpEngine as Engine
    recorded: list[list[float]] = []
    forward = Engine.forward

    def recording(self: Any, micro_batches: Any, read: Any) -> Any:
        outputs = forward(self, micro_batches, read)
        recorded.extend(output.double().flatten().tolist() for output in outputs)
        return outputs

    Engine.forward = recording
    return recorded


def write(out: Path, rank: int, passes: list[list[float]]) -> None:
    (out / f"reads.{rank}.json").write_text(json.dumps(passes))
    (out / f"operators.{rank}.json").write_text(json.dumps(calls))


if __name__ == "__main__":
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    kind = DeviceKind.CPU if sys.argv[1] == "cpu" else DeviceKind.NPU
    main(kind, Path(sys.argv[2]), Path(sys.argv[3]), sys.argv[4])
