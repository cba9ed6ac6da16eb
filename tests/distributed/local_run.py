"""Run the fixed run of `test_layout_invariance` on the local runtime.

python -m tests.distributed.local_run MODELS OUTPUT RANKS
"""

import sys
from pathlib import Path

from mindspeed_rlxf.checkpoint.directory import RunDirectory
from mindspeed_rlxf.cluster.local import LocalRuntime
from mindspeed_rlxf.config.enums import DeviceKind
from tests.distributed.llamas import PLAIN, with_local_runtime
from tests.distributed.test_layout_invariance import WHITENED, fixed_run
from tests.training import train


def main(folder: str, out: str, ranks: str) -> None:
    runtime = LocalRuntime(DeviceKind.CPU, timeout_s=60.0)
    config, prepared = fixed_run(Path(folder), Path(out), PLAIN, int(ranks), {}, WHITENED)
    config = with_local_runtime(config)
    directory = runtime.from_first(lambda: RunDirectory.create(config))
    train(config, prepared, directory, runtime, writes=runtime.is_first)
    runtime.shutdown()


if __name__ == "__main__":
    main(*sys.argv[1:])
