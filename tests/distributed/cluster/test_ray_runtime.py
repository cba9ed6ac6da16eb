"""The Ray runtime: calls, rows between roles, failures, deadlines and lost workers."""

import gc
import pickle
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from mindspeed_rlxf.cluster.errors import RuntimeTimeout, WorkerError
from mindspeed_rlxf.cluster.group import Sharded
from mindspeed_rlxf.config.enums import Role
from tests.distributed.cluster.group_checks import (
    build,
    check_failures,
    check_ranks_and_leaders,
    check_rows_between_layouts,
    check_two_roles_in_one_process,
    make_rows,
)
from tests.distributed.cluster.stand_ins import Numbers, StandIn
from tests.distributed.conftest import KeptPools

MakePools = Callable[..., list[Any]]


@pytest.fixture(scope="module")
def ray_pools(ray_runtime: Any) -> KeptPools:
    return KeptPools(ray_runtime)


@pytest.fixture
def make_pools(ray_pools: KeptPools) -> MakePools:
    """Pools of the given sizes, all different, which other tests use too."""
    return lambda *sizes: list(
        ray_pools.create_pools({f"pool_of_{n}": [n] for n in sizes}).values()
    )


@pytest.fixture
def make_hasty(ray_runtime: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[MakePools]:
    """Pools whose workers write their stacks after 2.4 s; the driver's deadline is 3 s."""
    made: list[Any] = []

    def make(*sizes: int) -> list[Any]:
        with monkeypatch.context() as patch:
            patch.setattr(ray_runtime, "timeout_s", 3.0)
            pools = ray_runtime.create_pools({f"hasty_{i}": [n] for i, n in enumerate(sizes)})
        made.extend(pools.values())
        return list(pools.values())

    yield make
    for pool in made:
        pool.shutdown()


@pytest.mark.parametrize(
    "check", [check_ranks_and_leaders, check_two_roles_in_one_process, check_failures]
)
def test_a_pool_passes_the_group_checks(make_pools: MakePools, check: Any) -> None:
    (pool,) = make_pools(2)
    check(pool)


def test_rows_reach_consumers_of_another_layout(make_pools: MakePools) -> None:
    one, two = make_pools(1, 2)
    check_rows_between_layouts(two, one)
    check_rows_between_layouts(one, two)


def test_calls_and_references_do_not_wait(make_pools: MakePools) -> None:
    producer, consumer = [build(pool) for pool in make_pools(1, 2)]
    numbers = Sharded([Numbers(torch.arange(4))])
    started = time.perf_counter()
    rows = producer.call(StandIn.make_late, numbers, 2.0).rows()
    pending = consumer.call(StandIn.read, rows.take([3, 2, 1, 0]))
    assert time.perf_counter() - started < 1.5
    assert [fetched.numbers for fetched in pending.result()] == [[3, 2], [1, 0]]
    assert pending.seconds < 1.5  # the wait for its inputs is not the method's time


def test_a_consumer_starts_when_its_own_rows_are_there(make_pools: MakePools) -> None:
    """A reward model scores what one replica generated while the others still generate."""
    consumer, producer = [build(pool) for pool in make_pools(1, 2)]
    numbers = Sharded([Numbers(torch.arange(2)), Numbers(torch.arange(2, 4))])
    made = producer.call(StandIn.make_one_late, numbers, 1, 1.0)
    (reply,) = consumer.call(StandIn.make, made.rows().take([0, 1])).replies()
    late = made.replies()[1]
    assert reply.started < late.started + late.seconds - 0.3


@pytest.mark.parametrize("count", [2, 20_000], ids=["inline", "shared memory"])
def test_a_role_may_change_its_rows_and_what_it_returned(make_pools: MakePools, count: int) -> None:
    (pool,) = make_pools(1)
    group = build(pool)
    rows = group.call(StandIn.make, Sharded([Numbers(torch.arange(count))])).rows()
    for _ in range(2):  # of which the second reads the rows anew
        doubled = group.call(StandIn.double_in_place, rows)
        assert group.call(StandIn.double_in_place, doubled.rows()).result() == [4 * (count - 1)]
        assert doubled.result() == [2 * (count - 1)]


def test_the_driver_hands_rows_on_and_never_reads_them(make_pools, monkeypatch):
    def refuse(rows: Numbers, state: object) -> None:
        raise AssertionError("the driver reads rows")

    one, two = [build(pool) for pool in make_pools(1, 2)]
    monkeypatch.setattr(Numbers, "__setstate__", refuse, raising=False)
    with pytest.raises(AssertionError, match="the driver reads rows"):
        pickle.loads(pickle.dumps(Numbers(torch.arange(1))))  # as Ray would
    for count in (2, 20_000):
        rows = one.call(StandIn.make, Sharded([Numbers(torch.arange(count))])).rows()
        read = two.call(StandIn.read, rows.take([1, 0]))
        assert [fetched.numbers for fetched in read.result()] == [[1], [0]]


def test_rows_are_freed_when_the_driver_has_no_reference_to_them(make_pools: MakePools) -> None:
    from ray._private.worker import global_worker

    (pool,) = make_pools(2)
    group = build(pool)

    def held() -> int:
        return len(global_worker.core_worker.get_all_reference_counts())

    group.call(StandIn.rank).result()
    gc.collect()
    before = held()
    rows = make_rows(group, 2)
    read = group.call(StandIn.read, rows.take([0, 1]))
    assert held() > before
    read.result()
    del rows, read
    deadline = time.monotonic() + 10
    while held() > before and time.monotonic() < deadline:
        time.sleep(0.05)
    assert held() == before


def test_the_failure_of_a_producer_is_reported_and_not_its_consumers(make_pools: MakePools) -> None:
    producer, consumer = [build(pool) for pool in make_pools(1, 2)]
    rows = producer.call(StandIn.fail_with_rows, Sharded([Numbers(torch.arange(4))])).rows()
    with pytest.raises(WorkerError) as caught:
        consumer.call(StandIn.read, rows).result()
    assert (caught.value.phase, caught.value.rank) == ("fail_with_rows", 0)
    assert caught.value.cause == "ValueError: no rows today"


def test_a_wait_ends_when_another_call_under_way_fails(make_pools: MakePools, tmp_path) -> None:
    """While generation runs ahead nobody waits for the updates, and the other way round."""
    trains, generates = [build(pool) for pool in make_pools(1, 2)]
    rows = Sharded([Numbers(torch.arange(1))] * 2)
    trains.call(StandIn.fail_alone, 0)
    running = generates.call(StandIn.make_late, rows, 60.0, str(tmp_path / "end"))
    with pytest.raises(WorkerError) as caught:
        running.result()
    assert (caught.value.phase, caught.value.cause) == ("fail_alone", "ValueError: only here")
    (tmp_path / "end").touch()
    running.result()


def test_a_hang_ends_and_names_the_ranks_that_did_not_arrive(make_hasty: MakePools) -> None:
    one, two = make_hasty(1, 1)
    producer, consumer = build(one), build(two, Role.CRITIC)
    rows = producer.call(StandIn.make_late, Sharded([Numbers(torch.arange(2))]), 20.0).rows()
    with pytest.raises(RuntimeTimeout) as hang:
        consumer.call(StandIn.read, rows).result()
    hang.match(r"^actor_rollout\.make_late: rank 0 did not arrive within 3 s; in worker\.run ")
    hang.match(r".*\(innermost frame: make_late\)$")
    assert (hang.value.role, hang.value.missing) == ("actor_rollout", [0])


def test_output_of_workers_goes_to_one_file_per_rank(ray_runtime, make_pools):
    (pool,) = make_pools(2)
    build(pool).call(StandIn.say, "hällo").result()
    for rank in range(2):
        log = ray_runtime.log_dir / "pool_of_2" / f"rank_{rank:05d}.log"
        assert log.read_text(encoding="utf-8").endswith("hällo\nfrom C\n")


def test_an_exception_arrives_as_one_worker_error(make_pools, capfd):
    (pool,) = make_pools(2)
    group = build(pool, Role.CRITIC)
    started = time.perf_counter()
    with pytest.raises(WorkerError) as caught:
        group.call(StandIn.fail_on, 1).result()  # rank 0 waits for rank 1, for ever
    assert time.perf_counter() - started < 30
    error = caught.value
    assert (error.role, error.rank, error.phase) == ("critic", 1, "fail_on")
    assert error.cause == "ValueError: a bad number"
    assert 'raise ValueError("a bad number")' in error.remote_traceback
    assert error.__cause__ is None and "ray" not in str(error)
    assert capfd.readouterr() == ("", "")
    group.call(StandIn.enter_barrier, 1).result()  # so that the processes can be used again


def test_a_stopped_rank_is_named_and_the_others_stacks_are_in_their_logs(ray_runtime, make_hasty):
    (pool,) = make_hasty(2)
    group = build(pool)
    with pytest.raises(RuntimeTimeout) as hang:
        group.call(StandIn.stop_on, 1).result()
    hang.match(r"stop_on: rank 1 did not arrive within 3 s; no stack in its log")
    assert hang.value.missing == [1]
    log = ray_runtime.log_dir / "hasty_0" / "rank_00000.log"
    assert "in stop_on" in log.read_text(encoding="utf-8")


def test_a_killed_worker_is_named_by_its_call_and_by_calls_that_wait_for_its_rows(
    make_pools: MakePools, ray_pools: KeptPools, capfd: pytest.CaptureFixture[str]
) -> None:
    producer, consumer = [build(pool) for pool in make_pools(2, 1)]
    dying = producer.call(StandIn.die_on, 1)  # rank 0 sees its connection close
    rows = producer.call(StandIn.make, Sharded([Numbers(torch.arange(2))] * 2)).rows()
    reading = consumer.call(StandIn.read, rows)
    with pytest.raises(WorkerError, match=r"rank 1 .* failed in die_on: the process died") as died:
        dying.result()
    assert died.value.rank == 1 and "rank_00001.log" in died.value.cause
    with pytest.raises(WorkerError, match="the process died") as lost:
        reading.result()
    assert (lost.value.rank, lost.value.phase) == (1, "make")
    assert "ray" not in "".join(capfd.readouterr())
    ray_pools.end_pools()
