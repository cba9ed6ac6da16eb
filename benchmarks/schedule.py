"""Schedules of generation ahead of training, in virtual time: seconds per batch, and kills.

    python -m benchmarks.schedule [--seeds 10000] [--batches 40] [--only-kills | --only-times]

The first part lets the real loop, stream and prompt source train with roles that take virtual time:
16 replicas, each with 128 responses of a batch, decode up to 128 rows at once; a decode step takes
20 ms + 0.1 ms per row, and responses that go on after a change of weights are prefilled again at
15,000 tokens per second. Training takes as long as a pool that is never idle generates. Printed are
seconds per batch over these, beside those of a simulation of the same schedule.

The second part draws a run for each seed (staleness, lead, filter, sizes, lengths), kills it at
random moments, resumes it from its last checkpoint, and compares it with the run without kills:
the same samples with the same weights versions, every prompt once, none too old.
"""

import argparse
import itertools
import random
import time
from collections import Counter

import numpy as np

from tests.virtual_roles import ROW_S, STEP_S
from tests.virtual_run import Setting, VirtualRun, run_with_kills

REPLICAS, SHARE, ROWS = 16, 128, 128  # replicas, their responses of a batch, rows decoded at once
WARM_UP = 10  # batches that are not measured
LENGTHS = {"short": (1500, 0.9, 16384), "long": (3000, 1.2, 32768)}  # median, sigma, most
MOST_RATIO = 1.15

# Lengths -> staleness -> seconds per batch over the ideal, of a simulation of equal slices
# (16 replicas, 40 batches); with slices of 16 steps they are those of 256 within 0.01.
SIMULATED = {
    "short": {0: 5.99, 1: 4.99, 2: 2.81, 4: 1.76, 8: 1.44},
    "long": {0: 5.08, 1: 4.08, 2: 2.40, 4: 1.64, 8: 1.50},
}
SLICE_STEPS = (256, 16)


def draw_lengths(rng: np.random.Generator, kind: str, count: int) -> np.ndarray:
    """Return lognormal lengths of responses, in tokens."""
    median, sigma, most = LENGTHS[kind]
    return np.clip(rng.lognormal(np.log(median), sigma, count), 16, most).astype(int)


def ideal_s(rng: np.random.Generator, kind: str) -> float:
    """Return the seconds that a pool which is never idle takes for a batch."""
    mean = draw_lengths(rng, kind, 100_000).mean()
    return float(SHARE * mean * (STEP_S + ROW_S * ROWS) / ROWS)


def seconds_per_batch(kind: str, slice_steps: int, staleness: int, batches: int) -> float:
    """Return virtual seconds per batch over the ideal."""
    rng = np.random.default_rng(0)
    ideal = ideal_s(rng, kind)
    per_batch = REPLICAS * SHARE
    lengths = draw_lengths(rng, kind, per_batch * (batches + staleness + 1))
    setting = Setting(
        staleness,
        min(staleness, 1),
        prompts=per_batch,
        group_size=1,
        iterations=batches,
        slice_steps=slice_steps,
        replicas=REPLICAS,
        rows=ROWS,
        update_s=ideal,
    )
    run = VirtualRun(setting, save_interval=batches + 1)
    run.rollout.length_of = lambda sample_id, _: int(lengths[sample_id])
    ends: list[float] = []
    run.trainer.hooks.append(lambda _: ends.append(run.clock.now))
    run.fit()
    return (ends[-1] - ends[WARM_UP - 1]) / (batches - WARM_UP) / ideal


def print_times(batches: int) -> bool:
    """Print seconds per batch; return whether no ratio to those simulated is over MOST_RATIO."""
    is_close = True
    for slice_steps, (kind, simulated) in itertools.product(SLICE_STEPS, SIMULATED.items()):
        for staleness, expected in simulated.items():
            found = seconds_per_batch(kind, slice_steps, staleness, batches)
            ratio = found / expected
            is_close &= ratio <= MOST_RATIO
            print(
                f"lengths {kind}, slices of {slice_steps}, staleness {staleness}: {found:.2f}, "
                f"simulated {expected:.2f}, ratio {ratio:.2f}",
                flush=True,
            )
    return is_close


def check_kills(seeds: range) -> None:
    """Run and kill a run for each seed; print counts. Raises AssertionError naming a seed."""
    began, kills = time.monotonic(), 0
    settings: Counter[tuple[int, int]] = Counter()
    for seed in seeds:
        setting = Setting.draw(seed)
        try:
            kills += run_with_kills(setting, random.Random(seed), 4, keeps_ahead=seed % 4 > 0)
        except Exception as error:
            raise AssertionError(f"seed {seed}, {setting}: {error}") from error
        settings[setting.staleness, setting.lead] += 1
    for (staleness, lead), count in sorted(settings.items()):
        print(f"staleness {staleness}, lead {lead}: {count} runs")
    print(f"{len(seeds)} runs, {kills} kills, {time.monotonic() - began:.0f} s", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--seeds", type=int, default=10_000)
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--batches", type=int, default=40)
    parser.add_argument("--only-kills", action="store_true")
    parser.add_argument("--only-times", action="store_true")
    arguments = parser.parse_args()
    if not arguments.only_times:
        check_kills(range(arguments.first_seed, arguments.first_seed + arguments.seeds))
    if not arguments.only_kills and not print_times(arguments.batches):
        raise SystemExit(f"seconds per batch are above {MOST_RATIO} times those simulated")


if __name__ == "__main__":
    main()
