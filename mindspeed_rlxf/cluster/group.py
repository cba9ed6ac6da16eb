"""All ranks of a role as one driver object: calls, reports and row references.

critic = RoleGroup(Role.CRITIC, config.layout(Role.CRITIC), pools["critic"])
critic.build(CriticRole, config).result()
values = critic.call(CriticRole.values, rollouts).rows()
"""

from __future__ import annotations

import itertools
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from mindspeed_rlxf.cluster.interface import BUILD, Call, Pool, Reply, Request
from mindspeed_rlxf.cluster.refs import RankRows, RowsRef, find_refs, split_refs
from mindspeed_rlxf.config.enums import Role
from mindspeed_rlxf.config.plugins import with_plugins
from mindspeed_rlxf.config.rank_layout import ParallelLayout
from mindspeed_rlxf.data.batch import Rows
from mindspeed_rlxf.reporting.phases import phase
from mindspeed_rlxf.reporting.timeline import MOST_RANKS, Span

T = TypeVar("T")
LONGEST_UNSEEN_S = 0.001  # of a wait that is left out
# Spans of calls that have ended, until they are written to the timeline. A process that writes none
# keeps the newest ones only.
_ended: deque[Span] = deque(maxlen=20_000)


@dataclass(frozen=True)
class Sharded:
    """An argument that differs by replica: every rank of replica i gets by_replica[i]."""

    by_replica: Sequence[Any]


class RoleFuture:
    """A submitted role call; `result` waits for its end."""

    def __init__(
        self,
        call: Call,
        leaders: list[int],
        num_rows: list[int | None],
        pool: str = "",
        what: Sequence[str] = (),
    ) -> None:
        self._call = call
        self._leaders = leaders
        self._num_rows = num_rows
        self.pool = pool
        self.what = what
        self._replies: list[Reply] | None = None
        self._order: Sequence[int] | None = None
        self._check: Callable[[list[Any]], None] | None = None
        self._before: list[RoleFuture] = []

    def reorder(self, rows: Sequence[int]) -> RoleFuture:
        """Make `rows` return this selection from the leaders' joined rows; returns self."""
        self._order = rows
        return self

    def after(self, other: RoleFuture) -> RoleFuture:
        """Make waits for this call wait for `other` first, whose rows it reads; returns self.

        Errors in `other` are raised then; its check (`require`) is not called.
        """
        self._before.append(other)
        return self

    def with_earlier(self) -> list[RoleFuture]:
        """Return the calls given to `after`, then this call."""
        return [*self._before, self]

    def require(self, check: Callable[[list[Any]], None]) -> RoleFuture:
        """Make `result` call `check` with the reports before returning them; returns self."""
        self._check = check
        return self

    def rows(self) -> RowsRef:
        """Return a reference to the leaders' rows in data-parallel order, or as set by `reorder`.

        Waits for the call only if the row count is unknown.
        """
        counts = list(self._num_rows)
        if None in counts:
            counts = [reply.num_rows for reply in self._leader_replies()]
        handles = [self._call.handles[rank] for rank in self._leaders]
        assert None not in counts, f"{handles} returned no rows"
        pieces = zip(handles, counts, strict=True)
        rows = RowsRef(tuple(RankRows(handle, n) for handle, n in pieces if n is not None))
        return rows if self._order is None else rows.reordered(self._order)

    def in_order(self, values: Sequence[T]) -> list[T]:
        """Return the leaders' values, joined, in the order of `rows`; one for each of their rows.

        Example: after `reorder([1, 0])`, the score of each row is
        `in_order([score for report in result() for score in report.scores])`.
        """
        return list(values) if self._order is None else [values[row] for row in self._order]

    def result(self) -> list[Any]:
        """Wait for the call; return the leaders' reports in data-parallel order."""
        reports = [reply.report for reply in self._leader_replies()]
        if self._check is not None:
            self._check(reports)
        return reports

    @property
    def seconds(self) -> float:
        """Seconds the slowest rank spent in the method; waits for the call to end."""
        return max(reply.seconds for reply in self.replies())

    def _leader_replies(self) -> list[Reply]:
        replies = self.replies()
        return [replies[rank] for rank in self._leaders]

    def replies(self) -> list[Reply]:
        """Wait for all ranks, first those in `after`; return their replies by rank.

        The first wait records the call for the timeline. Raises WorkerError or RuntimeTimeout.
        """
        if self._replies is None:
            for other in self._before:
                other.replies()
            wait_started = time.time()
            with phase(self.what[0] if self.what else "", prints=False):
                self._replies = self._call.wait()
            record_call(self.pool, self.what, self._replies, wait_started)
        return self._replies


class RoleGroup:
    """All ranks of one role."""

    def __init__(self, role: Role, layout: ParallelLayout, pool: Pool) -> None:
        assert layout.world_size == pool.world_size, (
            f"{role.value} is laid out over {layout.world_size} ranks, "
            f"its pool {pool.name} has {pool.world_size}"
        )
        self.role = role
        self.layout = layout
        self.pool = pool

    def build(self, factory: Callable[..., Any], *args: Any) -> RoleFuture:
        """Build the role on every rank; each process keeps `factory(*args)`."""
        return self.call(BUILD, *args, factory=with_plugins(factory))

    def call(self, method: Callable[..., Any] | str, *args: Any, **fields: Any) -> RoleFuture:
        """Submit a role method to every rank.

        Args:
            method: Plain function, such as `RolloutRole.generate`. It returns no rows, or as many
                as its rows of the first split argument with rows.
            args: Each replica gets its entry of a `Sharded`, and an equal contiguous shard of a
                RowsRef, alone or in a dataclass field. Other values are the same for all.
            fields: Further `Request` fields.
        """
        requests, num_rows = self._make_requests(method, args, **fields)
        names = _name_calls(requests)
        with phase(names[0], prints=False):  # without Ray the work is done here
            call = self.pool.submit(requests)
        return RoleFuture(call, self.layout.leaders(), num_rows, self.pool.name, names)

    def call_engine(self, method: Callable[..., Any], *args: Any) -> RoleFuture:
        """Submit a `TrainEngine` method to every rank's engine; its results are the reports."""
        return self.call(method, *args, of_engine=True)

    def prepare(self, method: Callable[..., Any], *args: Any) -> list[Request]:
        """Return the requests of `call(method, *args)`, for `submit_together`."""
        return self._make_requests(method, args)[0]

    def _make_requests(
        self, method: Callable[..., Any] | str, args: Sequence[Any], **fields: Any
    ) -> tuple[list[Request], list[int | None]]:
        """Return one request per rank, and each replica's row count, None if unknown.

        The count is that of the first split argument with rows. Only leaders keep rows.
        """
        name = method if isinstance(method, str) else method.__name__
        size = self.layout.dp
        replica_args: list[list[Any]] = [[] for _ in range(size)]
        num_rows: list[int | None] = [None] * size
        for arg in args:
            is_split = isinstance(arg, Sharded) or bool(find_refs(arg))
            shards = arg.by_replica if isinstance(arg, Sharded) else split_refs(arg, size)
            assert len(shards) == size, (
                f"{self.role.value} has {size} data-parallel ranks, got {len(shards)} shards"
            )
            for replica, shard in enumerate(shards):
                replica_args[replica].append(shard)
                if is_split and num_rows[replica] is None:
                    num_rows[replica] = _count_rows(shard)
        # One tuple for all ranks of a replica, so that Ray sends it once.
        args_by_replica = [tuple(values) for values in replica_args]
        requests = []
        for rank in range(self.layout.world_size):
            replica = self.layout.dp_rank(rank)
            is_leader = self.layout.is_leader(rank)
            replica_rows = num_rows[replica]
            requests.append(
                Request(
                    self.role, name, args_by_replica[replica], is_leader, replica_rows, **fields
                )
            )
        return requests, num_rows


def submit_together(pool: Pool, *requests_by_subpool: Sequence[Request]) -> RoleFuture:
    """Submit requests for several sub-pools as one call; their ranks may wait for each other.

    Those of a sub-pool come from `RoleGroup.prepare`, in rank order.
    """
    requests = list(itertools.chain.from_iterable(requests_by_subpool))
    return RoleFuture(pool.submit(requests), [], [], pool.name, _name_calls(requests))


def _name_calls(requests: Sequence[Request]) -> list[str]:
    return [f"{request.role.value}.{request.method}" for request in requests]


def _count_rows(value: Any) -> int | None:
    """Return the rows of an argument, those of the first reference if it is a dataclass.

    A list has the ids of rows.
    """
    if isinstance(value, (RowsRef, Rows)):
        return value.num_rows
    if isinstance(value, list):
        return len(value)
    refs = find_refs(value)
    return refs[0].num_rows if refs else None


def record_call(
    pool: str, names: Sequence[str], replies: Sequence[Reply], wait_started: float
) -> None:
    """Record the work of the first MOST_RANKS ranks and the driver's wait, for `take_spans`.

    The wait began at `wait_started`, epoch seconds; `names` has `role.method` per reply.
    """
    for name, reply in zip(names, replies, strict=False):
        if reply.rank < MOST_RANKS:
            _ended.append(Span(name, pool, reply.rank, reply.started, reply.seconds))
    waited_s = time.time() - wait_started
    if names and waited_s > LONGEST_UNSEEN_S:
        _ended.append(Span(f"wait for {names[0]}", "driver", 0, wait_started, waited_s, "wait"))


def take_spans() -> list[Span]:
    """Return the recorded spans in recording order, and forget them."""
    spans = []
    while _ended:
        spans.append(_ended.popleft())
    return spans
