"""The local runtime passes the checks of role groups, alone and under torchrun."""

import pytest

from tests.processes import free_port, run_python


def torchrun(ranks: int = 2) -> list[str]:
    """Ranks over numeric loopback addresses: no name server is asked for anything."""
    place = ["--local-addr", "127.0.0.1", "--master-addr", "127.0.0.1"]
    place += ["--master-port", str(free_port())]
    return ["-m", "torch.distributed.run", "--nproc-per-node", str(ranks), *place]


@pytest.mark.parametrize("ranks", [pytest.param(1, marks=pytest.mark.long), 2])
def test_the_local_runtime_passes_the_group_checks(ranks: int) -> None:
    launcher = torchrun() if ranks > 1 else []
    said = run_python(*launcher, "-m", "tests.distributed.cluster.local_driver", timeout_s=120)
    assert said.count("passed") == ranks
