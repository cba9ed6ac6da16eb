"""The local runtime passes the checks of role groups, alone and under torchrun."""

from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.forks import Forks
from tests.processes import free_port, run_python


def torchrun(ranks: int = 2) -> list[str]:
    """Ranks over numeric loopback addresses: no name server is asked for anything."""
    place = ["--local-addr", "127.0.0.1", "--master-addr", "127.0.0.1"]
    place += ["--master-port", str(free_port())]
    return ["-m", "torch.distributed.run", "--nproc-per-node", str(ranks), *place]


def test_the_local_runtime_passes_the_group_checks_without_torchrun(forks: Forks) -> None:
    ranks = {
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": "2",
    }  # fmt: skip

    def run(rank: int) -> str:
        driver = "tests.distributed.cluster.local_driver"
        return forks.run(driver, megatron=True, RANK=str(rank), LOCAL_RANK=str(rank), **ranks)

    with ThreadPoolExecutor() as pool:
        assert all("passed" in said for said in pool.map(run, range(2)))


@pytest.mark.long
@pytest.mark.parametrize("ranks", [1, 2])
def test_the_local_runtime_passes_the_group_checks(ranks: int) -> None:
    launcher = torchrun() if ranks > 1 else []
    said = run_python(*launcher, "-m", "tests.distributed.cluster.local_driver", timeout_s=120)
    assert said.count("passed") == ranks
