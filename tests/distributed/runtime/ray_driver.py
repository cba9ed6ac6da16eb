"""A driver for the tests that end it: prints one JSON line when its workers are busy, then waits.

`own`: starts and ends a cluster, then starts another. `join`: joins the one at RAY_ADDRESS.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import psutil

from mindspeed_rlxf.config.enums import DeviceKind
from mindspeed_rlxf.config.schema import DeviceConfig, RuntimeConfig
from mindspeed_rlxf.runtime.ray_runtime import RayRuntime
from tests.distributed.runtime.group_checks import build
from tests.distributed.runtime.stand_ins import StandIn


def start() -> RayRuntime:
    return RayRuntime(DeviceConfig(kind=DeviceKind.CPU), RuntimeConfig(), 2)


def main(mode: str) -> None:
    facts: dict[str, Any] = {}
    if mode == "own":
        first = start()
        facts["first_temp_dir"] = str(first.cluster.temp_dir)
        first.shutdown()
        facts["left_after_normal_end"] = [p.name() for p in psutil.Process().children(True)]
    runtime = start()
    try:
        group = build(runtime.create_pools({"pool": [1]})["pool"])
        facts["own"] = runtime.cluster.own
        facts["worker"] = group.call(StandIn.process).result()[0]
        facts["forwarded"] = group.call(StandIn.environment, "NCCL_RLXF_TEST").result()[0]
        facts["temp_dir"] = str(runtime.cluster.temp_dir)
        busy = group.call(StandIn.nap, 600.0)
        print(json.dumps(facts), flush=True)
        busy.result()
    finally:
        runtime.shutdown()


if __name__ == "__main__":
    main(sys.argv[1])
