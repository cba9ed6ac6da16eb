"""The stream of prompt groups that a run generates and trains, in the order of drawing.

Which groups form a batch depends on decode steps and scores alone, never on time.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from mindspeed_rlxf.data.batch import Prompts


@dataclass(eq=False)
class Group:
    """A prompt with its samples, from drawing to training.

    Attributes:
        prompts: A row for each sample.
        unfinished: Ids of the samples whose responses have not ended.
        greedy_is_missing: Whether a greedy response to the prompt has not ended.
        has_equal_scores: Whether all its scores are equal; None = not known.
    """

    prompts: Prompts
    unfinished: set[int] = field(default_factory=set)
    greedy_is_missing: bool = False
    has_equal_scores: bool | None = None

    @classmethod
    def draw(cls, prompts: Prompts, with_greedy: bool) -> Group:
        """Return a group of which nothing has ended."""
        return cls(prompts, set(prompts.sample_ids), with_greedy)

    def note_ended(self, sample_id: int, is_greedy: bool) -> bool:
        """Note that a response has ended; return False if that was known.

        After a resume the generating ranks tell again what had ended before.
        """
        if is_greedy:
            is_new = self.greedy_is_missing
            self.greedy_is_missing = False
            return is_new
        is_new = sample_id in self.unfinished
        self.unfinished.discard(sample_id)
        return is_new

    @property
    def first_id(self) -> int:
        """Id of the first sample, and of the greedy response."""
        return self.prompts.sample_ids[0]

    @property
    def has_samples(self) -> bool:
        """Whether all samples have ended."""
        return not self.unfinished

    @property
    def has_ended(self) -> bool:
        """Whether nothing of the group is still generated."""
        return not self.unfinished and not self.greedy_is_missing


@dataclass(frozen=True, eq=False)
class GroupBatch:
    """The groups of one iteration.

    Attributes:
        groups: Trained groups, in the order of drawing.
        passed: These and the dropped ones before the last of them; all that training passes.
    """

    groups: list[Group]
    passed: list[Group]

    @property
    def num_equal(self) -> int:
        """Trained groups whose scores are all equal, so that their advantages are 0."""
        return sum(bool(group.has_equal_scores) for group in self.groups)


class GroupStream:
    """The groups that were drawn and not trained.

    A batch is the next `batch_size` groups. With `filters` it is the next `batch_size` groups whose
    scores differ, once all groups before the last of them have ended and are scored; groups of
    equal scores are dropped. After `max_groups` groups without enough that differ, the first of
    these fill it.
    """

    def __init__(
        self,
        batch_size: int,
        batches_in_flight: int,
        filters: bool = False,
        max_groups: int | None = None,
    ) -> None:
        """Start empty.

        Args:
            batch_size: Groups of a batch.
            batches_in_flight: Batches' worth of groups to hold, not counting those known to have
                equal scores.
            filters: Whether groups of equal scores are dropped.
            max_groups: Most groups for one batch; None = no limit.
        """
        self.batch_size, self.batches_in_flight = batch_size, batches_in_flight
        self.filters, self.max_groups = filters, max_groups
        self.groups: deque[Group] = deque()  # the oldest first
        self._by_id: dict[int, Group] = {}  # by the ids of their samples
        self._num_equal = 0  # groups whose scores are known to be equal

    def add(self, groups: Iterable[Group]) -> None:
        """Append groups that were drawn."""
        for group in groups:
            self.groups.append(group)
            self._by_id |= dict.fromkeys(group.prompts.sample_ids, group)
            self._num_equal += bool(group.has_equal_scores)

    def find(self, sample_id: int) -> Group | None:
        """Return the group of a sample, None if it is not in the stream."""
        return self._by_id.get(sample_id)

    def note_scores(self, group: Group, has_equal_scores: bool) -> None:
        """Note whether all scores of a group are equal."""
        assert group.has_equal_scores is None, "a group is scored once"
        group.has_equal_scores = has_equal_scores
        self._num_equal += has_equal_scores

    def num_missing(self, batches_left: int) -> int:
        """Return how many groups to draw now; `batches_left` batches will still be trained.

        So many that the groups in the stream form `batches_in_flight` batches if all that are not
        scored yet differ. Then no group is trained later than in the last of these, as a group
        found to have equal scores only brings those behind it forward.
        """
        target = min(self.batches_in_flight, batches_left)
        num_batches, num_differing, num_groups = self._divide()
        if num_batches >= target:
            return 0
        missing = self.batch_size - num_differing
        if self.max_groups is not None:
            missing = min(missing, self.max_groups - num_groups)
        return missing + (target - num_batches - 1) * self.batch_size

    def _divide(self) -> tuple[int, int, int]:
        """Divide the groups into batches as if all that are not scored differed.

        Returns the whole batches, and of the groups behind them how many differ, and how many there
        are.
        """
        if self.max_groups is None:
            num_useful = len(self.groups) - self._num_equal
            num_batches, num_differing = divmod(num_useful, self.batch_size)
            return num_batches, num_differing, num_differing
        num_batches = num_differing = num_groups = 0
        for group in self.groups:
            num_groups += 1
            num_differing += not group.has_equal_scores
            if num_differing == self.batch_size or num_groups == self.max_groups:
                num_batches += 1
                num_differing = num_groups = 0
        return num_batches, num_differing, num_groups

    def find_batch(self) -> GroupBatch | None:
        """Return the next batch, None if it is not complete; the groups stay in the stream."""
        passed: list[Group] = []
        num_differing = 0
        for group in self.groups:
            is_known = group.has_equal_scores is not None or not self.filters
            if not (group.has_ended and is_known):
                return None
            passed.append(group)
            num_differing += not group.has_equal_scores
            if num_differing == self.batch_size:
                return GroupBatch([each for each in passed if not each.has_equal_scores], passed)
            if len(passed) == self.max_groups:
                return GroupBatch(self._fill(passed, self.batch_size - num_differing), passed)
        return None

    def _fill(self, passed: list[Group], num_filled: int) -> list[Group]:
        """Return the differing groups and the first `num_filled` others, in order."""
        chosen = []
        for group in passed:
            if group.has_equal_scores:
                num_filled -= 1
            if not group.has_equal_scores or num_filled >= 0:
                chosen.append(group)
        return chosen

    def pop(self, batch: GroupBatch) -> None:
        """Remove a batch of `find_batch`."""
        for group in batch.passed:
            assert self.groups[0] is group, "batches are trained in the order of drawing"
            self.groups.popleft()
            self._num_equal -= bool(group.has_equal_scores)
            for sample_id in group.prompts.sample_ids:
                del self._by_id[sample_id]

    def state_dict(self) -> dict[str, Any]:
        """Return, for each group in order, what has ended and whether scores are equal (JSON)."""
        return {
            "groups": [
                {
                    "unfinished": sorted(group.unfinished),
                    "greedy_is_missing": group.greedy_is_missing,
                    "is_alike": group.has_equal_scores,
                }
                for group in self.groups
            ]
        }

    def load_state_dict(self, state: dict[str, Any], prompts: Prompts) -> None:
        """Restore the result of `state_dict`, for the same groups drawn again (`prompts`)."""
        saved = state["groups"]
        assert not self.groups, "the stream is empty"
        if not saved:
            return
        size = prompts.num_rows // len(saved)
        for number, fields in enumerate(saved):
            rows = prompts.select(range(number * size, (number + 1) * size))
            unfinished = set(fields["unfinished"])
            assert unfinished <= set(rows.sample_ids), "the state is of other samples"
            group = Group(rows, unfinished, fields["greedy_is_missing"], fields["is_alike"])
            self.add([group])
