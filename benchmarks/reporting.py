"""Measure the driver's CPU time for reporting (console, files), in the tiny demo.

Trains the demo's model with the default `logging`, and measures the CPU time of each function of
the recorder, and of the live console on a terminal. Prints one JSON line; `share` is the CPU time
per iteration over the median time of an iteration. Makes the demo's models where they are missing.

    python benchmarks/reporting.py [--iterations 30]
"""

import argparse
import functools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import rich.live

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from mindspeed_rlxf.cli import train
from mindspeed_rlxf.trainer.recorder import Recorder

ROOT = Path(__file__).resolve().parents[1]
WRITERS = (
    "write_iteration",
    "check_health",
    "write_validation",
    "write_consumed",
    "write_timeline",
    "token_log",
    "write_samples",
)
MODELS = ROOT / "outputs" / "tiny"


class Clock:
    """Sums the CPU seconds of watched methods, by name.

    A watched method that another one calls counts for the caller only.
    """

    def __init__(self) -> None:
        self.seconds: dict[str, float] = defaultdict(float)
        self._thread = threading.local()

    def watch(self, owner: type, name: str) -> None:
        """Replace a method of a class by one that is measured."""
        setattr(owner, name, self._timed(name, getattr(owner, name)))

    def _timed(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def timed(*arguments: Any, **keys: Any) -> Any:
            if getattr(self._thread, "is_inside", False):
                return function(*arguments, **keys)
            self._thread.is_inside, start = True, time.thread_time()
            try:
                return function(*arguments, **keys)
            finally:
                self._thread.is_inside = False
                self.seconds[name] += time.thread_time() - start

        return timed


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--iterations", type=int, default=30)
    count = parser.parse_args().iterations
    os.chdir(ROOT)
    if not MODELS.exists():
        make = [sys.executable, "examples/tiny/make.py", "--output", str(MODELS)]
        subprocess.run(make, check=True, stdout=sys.stderr)
    clock = Clock()
    for name in WRITERS:
        clock.watch(Recorder, name)
    clock.watch(rich.live.Live, "refresh")
    with tempfile.TemporaryDirectory() as folder:
        keys = [f"training.output_dir={folder}/run", f"training.train_iters={count}"]
        code = train.main(["--config-name", "ppo_trainer_tiny", *keys])
        assert code == 0, f"the run ended with {code}"
        lines = (Path(folder) / "run" / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    found = [json.loads(line)["metrics"].get("timing/all") for line in lines]
    iteration = statistics.median(seconds for seconds in found if seconds)
    each = {name: seconds / count for name, seconds in sorted(clock.seconds.items())}
    print(
        json.dumps(
            {
                "benchmark": "reporting",
                "live": sys.stdout.isatty(),
                "cores": os.cpu_count(),
                "iteration_s": round(iteration, 3),
                "driver_ms": {name: round(1e3 * seconds, 2) for name, seconds in each.items()},
                "share": round(sum(each.values()) / iteration, 4),
            }
        )
    )


if __name__ == "__main__":
    main()
