"""Run the group checks on the local runtime, in one process or as a rank of torchrun.

`test_local_runtime` starts it.
"""

import os
import sys
import time

import pytest

from mindspeed_rlxf.cluster.errors import RuntimeTimeout
from mindspeed_rlxf.cluster.local import LocalRuntime
from mindspeed_rlxf.config.enums import DeviceKind
from mindspeed_rlxf.config.problems import UserError
from tests.distributed.cluster.group_checks import (
    build,
    check_failures,
    check_ranks_and_leaders,
    check_rows_between_layouts,
    check_two_roles_in_one_process,
)
from tests.distributed.cluster.stand_ins import StandIn


def main() -> None:
    rank, size = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    runtime = LocalRuntime(DeviceKind.CPU, timeout_s=30.0)
    one, two = runtime.create_pools({"one": [size], "two": [size]}).values()
    check_ranks_and_leaders(one)
    check_rows_between_layouts(one, two)
    check_two_roles_in_one_process(one)
    check_failures(one)
    with pytest.raises(UserError, match=f"must add up to the {size} processes of runtime=local"):
        runtime.create_pools({"three": [size + 1]})
    if size > 1:
        check_hang(runtime, rank)
    runtime.shutdown()


def check_hang(runtime: LocalRuntime, rank: int) -> None:
    """A call that rank 1 never enters times out on rank 0 with the missing rank in its message."""
    pool = runtime.create_pools({"hang": [2]})["hang"]
    group = build(pool)
    if rank == 1:
        time.sleep(3)
        return
    runtime.timeout_s = 1.0
    with pytest.raises(RuntimeTimeout, match=r"actor_rollout\.rank: rank 1 did not arrive"):
        group.call(StandIn.rank)


if __name__ == "__main__":
    main()
    print("passed", file=sys.stderr)
