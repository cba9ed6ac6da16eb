"""A driver that tests interrupt or kill.

It starts a Ray cluster, or joins the one at RAY_ADDRESS, prints a line of JSON when its worker is
busy, and waits. After the first SIGINT it shuts its runtime down and does the same once more.
"""

import contextlib
import json
import signal
from typing import Any

from mindspeed_rlxf.cluster.ray.runtime import RayRuntime
from mindspeed_rlxf.config.enums import DeviceKind
from mindspeed_rlxf.config.schema import DeviceConfig, RuntimeConfig
from tests.distributed.cluster.group_checks import build
from tests.distributed.cluster.stand_ins import StandIn


def serve() -> None:
    """Start a runtime with one worker, print facts about both as JSON, and wait up to 600 s."""
    runtime = RayRuntime(DeviceConfig(kind=DeviceKind.CPU), RuntimeConfig(), 1)
    try:
        pool = runtime.create_pools({"pool": [1]})["pool"]
        group = build(pool)
        facts: dict[str, Any] = {"own": runtime.cluster.own}
        facts["worker"] = group.call(StandIn.process).result()[0]
        facts["forwarded"] = group.call(StandIn.environment, "NCCL_RLXF_TEST").result()[0]
        facts["secret"] = group.call(StandIn.environment, "NCCL_RLXF_TOKEN").result()[0]
        facts["address"] = runtime.cluster.address
        facts["temp_dir"] = str(runtime.cluster.temp_dir)
        busy = group.call(StandIn.nap, 600.0)
        print(json.dumps(facts), flush=True)
        busy.result()
    finally:
        runtime.shutdown()


if __name__ == "__main__":
    # A process in the background of a shell ignores SIGINT, and its children inherit that.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    with contextlib.suppress(KeyboardInterrupt):
        serve()
    serve()
