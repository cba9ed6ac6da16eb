"""Measure as much as possible on one device in a few minutes: one JSON line per stage.

For a device that is at hand rarely and briefly: no network, no Ray, no hub. The stages
(`device_stages/`) are in order of value, each in a process of its own with a time limit. A line
is printed, and appended to `results.jsonl`, as soon as its stage ends, so that nothing is lost if
the time is cut. A stage that fails or runs past its limit prints its `error`; its output is in
`STAGE.log`. The next stage goes on, or is `skipped` if too little time is left.

    python benchmarks/on_device.py --device cuda [--minutes 9] [--trl FOLDER] [--vllm PYTHON]
    python benchmarks/on_device.py --quick                  # tiny sizes, the same code
    python benchmarks/on_device.py --stages resume,trace-1.5b
    python benchmarks/on_device.py --table FILE.jsonl       # a section of docs/results.md

Limits are those of 9 minutes, and grow with `--minutes`. `ppo_step.py` says how to install TRL into
a folder. Stages are forked from this process, which has imported the libraries but never uses the
device. If that fails on a device they are started anew (`--start spawn`), which takes longer.
"""

from __future__ import annotations

import argparse
import json
import logging
import multiprocessing
import os
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from device_stages import STAGES
from device_stages.settings import FULL, QUICK, ROOT, Settings, Stage
from device_stages.table import table

sys.path.insert(0, str(ROOT))  # for this checkout's package and tests

MINUTES = 9.0
ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
    # Counting devices then asks the driver, and forked processes can still start CUDA.
    "PYTORCH_NVML_BASED_CUDA_CHECK": "1",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the stages, or print a table; return 1 if a stage failed, else 0."""
    started = time.monotonic()
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--device", choices=["cpu", "cuda", "npu"], default="cpu")
    parser.add_argument("--minutes", type=float, default=MINUTES, help="for everything (9)")
    parser.add_argument("--quick", action="store_true", help="tiny sizes, to try the code")
    parser.add_argument("--trl", type=Path, help="folder with trl; measures it too")
    parser.add_argument("--vllm", type=Path, help="interpreter with vLLM; measures it too")
    parser.add_argument("--threads", type=int, help="of each process (half the cores)")
    parser.add_argument("--stages", help="only these, such as update-1.5b-megatron,resume")
    parser.add_argument("--output", type=Path, help="folder for lines and logs (in outputs/)")
    parser.add_argument("--start", choices=["fork", "spawn"], default="fork")
    parser.add_argument("--table", type=Path, metavar="FILE", help="print lines as Markdown")
    arguments = parser.parse_args(argv)
    if arguments.table:
        lines = arguments.table.read_text(encoding="utf-8").splitlines()
        print(table([json.loads(line) for line in lines], STAGES))
        return 0
    names = [stage.name for stage in STAGES]
    chosen = arguments.stages.split(",") if arguments.stages else names
    if unknown := set(chosen) - set(names):
        parser.error(f"--stages={','.join(sorted(unknown))} must be of {','.join(names)}")
    folder = arguments.output or ROOT / "outputs" / time.strftime("on_device-%Y%m%d-%H%M%S")
    folder.mkdir(parents=True, exist_ok=True)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # ends the stage too
    os.environ.update(ENVIRONMENT)
    import_libraries()
    scale = max(1.0, arguments.minutes / MINUTES)
    stages = [replace(s, limit_s=s.limit_s * scale) for s in STAGES if s.name in chosen]
    with tempfile.TemporaryDirectory(prefix="rlxf-on-device-") as scratch:
        settings = Settings(
            device=arguments.device,
            sizes=QUICK if arguments.quick else FULL,
            threads=arguments.threads or max(1, (os.cpu_count() or 1) // 2),
            folder=folder.resolve(),
            scratch=Path(scratch),
            trl=arguments.trl and arguments.trl.resolve(),
            vllm=arguments.vllm and arguments.vllm.absolute(),
            start=arguments.start,
        )
        return run_all(stages, settings, started + 60 * arguments.minutes)


def import_libraries() -> None:
    """Import what the stages use, but no Megatron, which comes after the device's set-up."""
    from transformers import (  # noqa: F401
        AutoModelForCausalLM,
        LlamaForCausalLM,
        LlamaForSequenceClassification,
        PreTrainedTokenizerFast,
        Qwen2ForCausalLM,
    )

    from mindspeed_rlxf.cli import train  # noqa: F401
    from mindspeed_rlxf.roles import actor  # noqa: F401
    from mindspeed_rlxf.trainer import preflight, run  # noqa: F401


def run_all(stages: Sequence[Stage], settings: Settings, deadline: float) -> int:
    """Run the stages until the deadline of `time.monotonic`; return 1 if one failed, else 0.

    Prints a line for each stage, and appends it to `results.jsonl`.
    """
    failed = False
    for stage in stages:
        left_s = deadline - time.monotonic()
        if left_s < stage.limit_s / 3:
            line = {"stage": stage.name, "skipped": "out of time"}
        else:
            line = run_stage(stage, settings, min(stage.limit_s, left_s))
        if stage.name == "environment" and "error" in line and settings.start == "fork":
            settings = replace(settings, start="spawn")
            line = run_stage(stage, settings, stage.limit_s) | {"fork_error": line["error"]}
        failed |= "error" in line
        text = json.dumps(line)
        print(text, flush=True)
        with open(settings.folder / "results.jsonl", "a", encoding="utf-8") as file:
            file.write(text + "\n")
    return int(failed)


def run_stage(stage: Stage, settings: Settings, limit_s: float) -> dict[str, Any]:
    """Run a stage in a process group of its own, which is killed at the end; return its line."""
    result = settings.folder / f"{stage.name}.json"
    result.unlink(missing_ok=True)
    started = time.monotonic()
    process = multiprocessing.get_context(settings.start).Process(
        target=work, args=(stage, settings, result)
    )
    process.start()
    assert process.pid is not None, "the process has started"
    try:
        process.join(limit_s)
        is_late = process.exitcode is None
    finally:
        process.kill()
        with suppress(ProcessLookupError):  # the group ended with the process
            os.killpg(process.pid, signal.SIGKILL)
        process.join()
    line: dict[str, Any] = {"stage": stage.name}
    if result.exists():
        line |= json.loads(result.read_text(encoding="utf-8"))
        result.unlink()
    elif is_late:
        line["error"] = f"no end after {limit_s:.0f} s; {last_output(stage, settings)}"
    else:
        line["error"] = f"exit code {process.exitcode}; {last_output(stage, settings)}"
    line["seconds"] = round(time.monotonic() - started, 1)
    return line


def work(stage: Stage, settings: Settings, result: Path) -> None:
    """Run a stage in this process, its output in STAGE.log; write its figures to `result`."""
    os.setsid()
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    log = os.open(settings.folder / f"{stage.name}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(log, 1)
    os.dup2(log, 2)
    logging.basicConfig(stream=sys.stderr)
    logging.getLogger("mindspeed_rlxf").setLevel(logging.INFO)  # names the chosen kernels
    try:
        figures = stage.run(settings)
    except BaseException as error:
        traceback.print_exc()
        text = " ".join(str(error).split())
        figures = {"error": f"{type(error).__name__}: {text[:300]}"}
    unfinished = result.with_suffix(".part")
    unfinished.write_text(json.dumps(figures), encoding="utf-8")
    unfinished.rename(result)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # libraries of a device may hang when they are torn down


def last_output(stage: Stage, settings: Settings) -> str:
    """Return the last lines of a stage's log."""
    log = settings.folder / f"{stage.name}.log"
    text = log.read_text(encoding="utf-8", errors="replace") if log.exists() else ""
    return "its last output: " + " / ".join(text.strip().splitlines()[-3:])[-300:]


if __name__ == "__main__":
    sys.exit(main())
