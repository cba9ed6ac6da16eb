"""The loop over roles in virtual time: generation ahead of training, kills, and faults put in."""

from __future__ import annotations

import random
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import pytest

from mindspeed_rlxf.trainer.ppo import StaleSamples
from mindspeed_rlxf.trainer.prompt_source import PromptSource
from tests.virtual_run import Setting, VirtualRun, run_whole, run_with_kills

AHEAD = Setting(staleness=3, lead=1, iterations=6)
FILTERED = replace(AHEAD, filters=True)


@pytest.mark.parametrize("seed", range(24))
def test_a_run_with_kills_is_the_unfailed_one(seed: int) -> None:
    """Every third seed loses what its checkpoints have of samples generated ahead."""
    run_with_kills(Setting.draw(seed), random.Random(seed), kills=3, keeps_ahead=seed % 3 > 0)


@pytest.mark.parametrize("seed", [210, 360])
def test_groups_alike_that_fill_batches_bring_none_beyond_the_bound(seed: int) -> None:
    """They are trained after all, so what is drawn for them must not come too early."""
    run_whole(Setting.draw(seed))


@pytest.mark.parametrize("setting", [AHEAD, FILTERED, replace(AHEAD, remax=True)])
def test_times_of_calls_change_nothing(setting: Setting) -> None:
    """Slow updates and slow slices: the same samples with the same versions."""
    slow = replace(setting, update_s=100.0)
    assert run_whole(slow).trained == run_whole(setting).trained


def test_generation_runs_beside_the_updates() -> None:
    times = {}
    for name, staleness, lead in (("apart", 1, 1), ("in turn", 0, 0)):
        times[name] = run_whole(Setting(staleness, lead, iterations=8, update_s=2.0)).clock.now
    assert times["apart"] < 0.8 * times["in turn"]


@pytest.mark.parametrize(("staleness", "lead"), [(0, 0), (1, 1)])
@pytest.mark.parametrize("filters", [False, True])
def test_what_a_failed_server_leaves_is_asked_for_after_the_weights(
    staleness: int, lead: int, filters: bool
) -> None:
    """Each sample once, and in order, as `run_whole` checks."""
    setting = Setting(
        staleness, lead, filters=filters, slice_steps=100, warmup=2, failures=(1, 3, 4)
    )
    run = run_whole(setting)
    assert run.rollout.num_slices >= setting.iterations + len(setting.failures)
    assert run.consumed == run_whole(replace(setting, failures=())).consumed


def reset_versions(run: VirtualRun) -> None:
    run.num_updates = 0


def weights_late(run: VirtualRun) -> None:
    """The trainer sends weights only when the next update has been submitted."""
    update, send = run.update_policy, run.rollout.update_weights
    waiting: list[Any] = []

    def update_first(*arguments: Any) -> Any:
        call = update(*arguments)
        while waiting:
            send(*waiting.pop())
        return call

    run.update_policy = update_first  # type: ignore[method-assign]
    run.rollout.update_weights = lambda *weights: waiting.append(weights)  # type: ignore[method-assign]


def weights_lost(run: VirtualRun) -> None:
    run.rollout.update_weights = lambda *_: None  # type: ignore[method-assign]


def cache_kept(run: VirtualRun) -> None:
    run.rollout.withdraw = lambda: run.generating.submit(0.0)  # type: ignore[method-assign]


def cursor_ahead(run: VirtualRun) -> None:
    """The saved position is that of what was drawn."""

    def drawn(source: PromptSource) -> dict[str, Any]:
        state = PromptSource.state_dict(source)
        return {
            **state,
            "offset": state["offset"] + source._num_drawn,
            "next_sample_id": state["next_sample_id"]
            + source._num_drawn * source.n_samples_per_prompt,
        }

    run.source.state_dict = lambda: drawn(run.source)  # type: ignore[method-assign]


def draws_again(run: VirtualRun) -> None:
    """A resumed run forgets what had been generated, and draws it with newer weights."""
    load = run.trainer.load_state_dict

    def forgetful(state: dict[str, Any]) -> None:
        run.rollout.saved.clear()
        load({**state, "stream": {"groups": []}})

    run.trainer.load_state_dict = forgetful  # type: ignore[method-assign]


def surplus_lost(run: VirtualRun) -> None:
    """What was generated beyond a batch is thrown away."""
    stream = run.trainer.samples.stream
    pop = stream.pop

    def pop_all(batch: Any) -> None:
        pop(batch)
        while stream.groups and stream.groups[0].has_ended:
            group = stream.groups.popleft()
            batch.passed.append(group)
            stream._num_equal -= bool(group.has_equal_scores)

    stream.pop = pop_all  # type: ignore[method-assign]


FAULTS: dict[str, tuple[Callable[[VirtualRun], None], Setting]] = {
    "the counter is 0 after recovery": (reset_versions, AHEAD),
    "the cursor runs ahead of training": (cursor_ahead, AHEAD),
    "resume draws again": (draws_again, AHEAD),
    "surplus groups are thrown away": (surplus_lost, FILTERED),
    "weights are sent after the next update was submitted": (weights_late, AHEAD),
    "a sync is not delivered": (weights_lost, AHEAD),
    "a cache is kept over a point": (cache_kept, AHEAD),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_put_in_is_found(fault: str) -> None:
    """By the checks of the loop and its roles, or by the comparison with the unfailed run.

    Not here: an error of a producer (`test_a_wait_ends_when_another_call_under_way_fails`), and
    ratios against current weights (`tests/unit/config/test_staleness.py`).
    """
    put_in, setting = FAULTS[fault]
    run_with_kills(setting, random.Random(1), kills=3, keeps_ahead=True)
    make = VirtualRun.__post_init__

    def faulty(run: VirtualRun) -> None:
        make(run)
        put_in(run)

    whole = run_whole(setting)
    with ExitStack() as patches:
        patches.enter_context(patch("tests.virtual_run.run_whole", lambda _: whole))
        patches.enter_context(patch.object(VirtualRun, "__post_init__", faulty))
        with pytest.raises((AssertionError, StaleSamples)):
            run_with_kills(setting, random.Random(1), kills=3, keeps_ahead=True)


def test_a_token_that_is_too_old_ends_the_run_and_is_named() -> None:
    run = VirtualRun(AHEAD)
    weights_lost(run)
    with pytest.raises(StaleSamples, match=r"iteration 5 .* version 1 or newer .* sample \d+ "):
        run.fit()
