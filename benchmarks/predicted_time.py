"""Compare predicted and measured seconds of an iteration, for models not used to calibrate.

Calibrates as `doctor --calibrate` does, without a file, then trains models of three other shapes:
PPO with four models of 5 to 20 M parameters each (on a device larger), one process. Prints one JSON
line; `worst` is the largest relative error of an iteration. On a CPU with one thread prediction and
measurement are CPU seconds of the process, so that other programs of the machine do not count.

    python benchmarks/predicted_time.py [--device auto] [--threads 1] [--calibration FILE]
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path
from typing import Any

import torch

from mindspeed_rlxf import device
from mindspeed_rlxf.config.enums import DeviceKind
from mindspeed_rlxf.models.parameters import Head
from mindspeed_rlxf.models.sizes import model_numbers
from mindspeed_rlxf.ops.planning.calibrate import Measured, Shape, calibrate, measure
from mindspeed_rlxf.ops.planning.calibration import read_calibration
from mindspeed_rlxf.ops.planning.prediction import predict
from mindspeed_rlxf.ops.planning.rates import Rates

SHAPES = {
    DeviceKind.CPU: (
        Shape(6, 320, 896, 5, 5, 1024, 16, 32, 64, 4),
        Shape(4, 512, 1408, 8, 8, 2048, 16, 48, 48, 4),
        Shape(12, 256, 704, 4, 2, 512, 16, 64, 64, 4),
    )
}
ON_DEVICES = (
    Shape(12, 1280, 3456, 20, 4, 8192, 64, 128, 256, 8),
    Shape(6, 2560, 6912, 20, 20, 16384, 32, 256, 128, 8),
    Shape(20, 1024, 2816, 16, 8, 32768, 64, 64, 512, 16),
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    kinds = [kind.value for kind in DeviceKind]
    parser.add_argument("--device", choices=kinds, default="auto")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--calibration", help="use this file of doctor --calibrate")
    arguments = parser.parse_args()
    kind = device.resolve_kind(DeviceKind(arguments.device))
    threads, bf16 = arguments.threads, kind is not DeviceKind.CPU
    if arguments.calibration:
        found = read_calibration(Path(arguments.calibration), kind, threads, bf16)
    else:
        found = calibrate(kind, threads, lambda text: print(text, file=sys.stderr, flush=True))
    rates = found.rates(None)
    rows = []
    for shape in SHAPES.get(kind, ON_DEVICES):
        rows.append(compared(measure(shape, kind, threads), rates))
        print(rows[-1], file=sys.stderr, flush=True)
    print(
        json.dumps(
            {
                "benchmark": "predicted_time",
                "device": found.device,
                "cores": os.cpu_count(),
                "torch": torch.__version__,
                "fitted_within": round(found.worst, 3),
                "runs": rows,
                "worst": max(abs(row["error"]) for row in rows),
            }
        )
    )


def compared(run: Measured, rates: Rates) -> dict[str, Any]:
    """Compare one run with its prediction, as a whole and by phase.

    Errors are predicted / measured - 1.
    """
    made, measured_s = predict(run.config, rates), run.seconds["all"]
    a = run.config.actor_rollout.architecture
    return {
        "parameters_m": round(model_numbers(a, Head.LANGUAGE_MODEL) / 1e6, 1),
        "measured_s": round(measured_s, 3),
        "predicted_s": round(made.iteration_s, 3),
        "error": round(made.iteration_s / measured_s - 1, 3),
        "phases": {
            phase.name: round(seconds / run.seconds[phase.name] - 1, 2)
            for phase, seconds in made.phases
        },
    }


if __name__ == "__main__":
    main()
