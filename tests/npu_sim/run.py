"""Run cases on the CPU and on simulated NPUs, and report where they differ.

    RLXF_MINDSPEED=... RLXF_MEGATRON_LM=... python -m tests.npu_sim.run [case ...]

The variables name checkouts of MindSpeed and of the Megatron-LM version that it requires; without
them the small adaptor runs with the installed megatron-core. The real ones also import einops,
scipy, sentencepiece and six, which have to be installed.
"""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from tests.chaos.same_run import MACHINE_METRICS
from tests.npu_sim import processes
from tests.npu_sim.cases import CASES, Case, operators_of
from tests.processes import ROOT, free_port, read_lines, start_logged

SOURCES = {"mindspeed": "RLXF_MINDSPEED", "megatron": "RLXF_MEGATRON_LM"}
VARIABLES = tuple(SOURCES.values())
MAX_DEVICES = 4  # simulated devices that a process sees
TIMEOUT_S = 900
TOLERANCE = 1e-5


def missing() -> list[str]:
    return [name for name in VARIABLES if not Path(os.environ.get(name, "/nowhere")).is_dir()]


def environment(kind: str, scratch: Path) -> dict[str, str]:
    """kind: cpu; sim = delayed copies, and the small adaptor if no checkout is named."""
    if kind == "sim":
        sources: list[Path] = []
        if not missing():
            sources = [link_package(name, os.environ[v], scratch) for name, v in SOURCES.items()]
            sources += [processes.KERNELS] if needs_triton() else []
        return processes.environment(scratch, MAX_DEVICES, sources, RLXF_SIM_DELAYED="1")
    path = [ROOT]
    if checkout := os.environ.get("RLXF_MEGATRON_LM"):  # else the CPU path uses the installed one
        path.append(link_package("megatron", checkout, scratch))
    given = [os.environ["PYTHONPATH"]] if os.environ.get("PYTHONPATH") else []
    paths = os.pathsep.join([*map(str, path), *given])
    return {**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"}


def needs_triton() -> bool:
    start = Path("mindspeed", "features_manager", "megatron_basic", "requirements_basic.py")
    return "ops.triton" in Path(os.environ["RLXF_MINDSPEED"], start).read_text(encoding="utf-8")


def link_package(package: str, checkout: str, scratch: Path) -> Path:
    """Link one package: a checkout of Megatron-LM also has `tests`, which would hide ours."""
    link = scratch / "sources" / package / package
    link.parent.mkdir(parents=True, exist_ok=True)
    if not link.is_symlink():
        link.symlink_to(Path(checkout).resolve() / package)
    return link.parent


def run_case(kind: str, folder: Path, out: Path, name: str, scratch: Path) -> None:
    """Run all ranks of a case. Raises RuntimeError with the output of the first that fails."""
    ranks = CASES[name].ranks
    world = {
        "WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()),
        **environment(kind, scratch),
    }  # fmt: skip
    command = [sys.executable, "-m", "tests.npu_sim.worker", kind]
    command += [str(folder), str(out), name]
    logs = [scratch / f"{kind} {name} {rank}.log" for rank in range(ranks)]
    started = []
    try:
        for rank, log in enumerate(logs):
            own = {**world, "RANK": str(rank), "LOCAL_RANK": str(rank)}
            started.append(start_logged(command, log, own))
        codes = [process.wait(TIMEOUT_S) for process in started]
    finally:
        for process in started:
            process.kill()
            process.wait()
    for code, log in zip(codes, logs, strict=True):
        if code != 0:
            raise RuntimeError(f"{kind} {name}: exit {code}\n{log.read_text()[-6000:]}")


def differences(ours: Path, theirs: Path, ranks: int) -> list[tuple[str, float]]:
    found = []
    for rank in range(ranks):
        pair = [json.loads((out / f"reads.{rank}.json").read_text()) for out in (ours, theirs)]
        assert [len(r) for r in pair[0]] == [len(r) for r in pair[1]], "passes of other sizes"
        for number, (one, other) in enumerate(zip(*pair, strict=True)):
            found.append((f"forward pass {number} of rank {rank}", distance(one, other)))
    return found + result_differences(ours, theirs)


def result_differences(ours: Path, theirs: Path) -> list[tuple[str, float]]:
    found = []
    lines = [read_lines(out / "metrics.jsonl") for out in (ours, theirs)]
    for one, other in zip(*lines, strict=True):
        for name, value in one["metrics"].items():
            if not name.startswith(MACHINE_METRICS):
                subject = f"iteration {one['iteration']} {name}"
                found.append((subject, distance([value], [other["metrics"][name]])))
    for role in ("actor", "critic"):
        tensors = [read_tensors(out / "final" / f"{role}_hf") for out in (ours, theirs)]
        for name, tensor in tensors[0].items():
            pair = [t.flatten().tolist() for t in (tensor, tensors[1][name])]
            found.append((f"{role} {name}", distance(*pair)))
    return found


def read_operators(out: Path, case: Case) -> tuple[list[dict[str, int]], list[str]]:
    """Return how often each rank called each operator, and a message for each that it lacks."""
    files = [out / f"operators.{rank}.json" for rank in range(case.ranks)]
    counts = [json.loads(file.read_text()) for file in files]
    lacking = [
        f"rank {rank} never called {name}: this path of MindSpeed was not rehearsed"
        for rank, called in enumerate(counts)
        for name in operators_of(not missing())
        if name not in case.uncalled and not called.get(name)
    ]
    return counts, lacking


def distance(one: list[float], other: list[float]) -> float:
    """Return the largest difference, divided by the largest |number| of `one` if that exceeds 1."""
    scale = max([1.0, *map(abs, one)])
    return max((abs(a - b) for a, b in zip(one, other, strict=True)), default=0.0) / scale


def read_tensors(folder: Path) -> dict[str, Any]:
    from safetensors.torch import load_file

    return {
        k: v for file in sorted(folder.glob("*.safetensors")) for k, v in load_file(file).items()
    }


def make_models(folder: Path, architecture: str, scratch: Path) -> None:
    """Write tokenizer and models in a process of its own: it imports Megatron."""
    code = (
        "import sys; from pathlib import Path; from tests.distributed import llamas\n"
        "llamas.make_models(Path(sys.argv[1]), getattr(llamas, sys.argv[2]))"
    )
    command = [sys.executable, "-c", code, str(folder), architecture]
    subprocess.run(command, cwd=ROOT, env=environment("cpu", scratch), check=True)


def rehearse(name: str, scratch: Path) -> bool:
    """Compare a case on CPU and on simulated NPUs, whose ranks must call its operators."""
    architecture = CASES[name].architecture
    folder = scratch / architecture
    make_models(folder, architecture, scratch)
    outs = [scratch / f"{each} {name}" for each in ("cpu", "sim")]
    with ThreadPoolExecutor() as both:
        runs = [
            both.submit(run_case, each, folder, out, name, scratch)
            for each, out in zip(("cpu", "sim"), outs, strict=True)
        ]
        for each in runs:
            each.result()
    counts, uncalled = read_operators(outs[1], CASES[name])
    found = differences(outs[0], outs[1], CASES[name].ranks)
    over = [(what, by) for what, by in found if by > TOLERANCE]
    worst = max(by for _, by in found)
    print(f"{name}: {len(found)} values, largest difference {worst:.1e}; operators {counts}")
    for what, by in over[:5]:
        print(f"  {what}: {by:.1e} is over {TOLERANCE:.0e}")
    for what in uncalled:
        print(f"  {what}")
    return not over and not uncalled


def rehearse_each(
    names: Sequence[str], rehearse_one: Callable[[str, Path], bool], parent: str | None = None
) -> bool:
    """Rehearse cases in scratch folders of their own; one that raises counts as different."""
    failed = []
    for name in names:
        with tempfile.TemporaryDirectory(prefix="rlxf", dir=parent) as scratch:
            try:
                agrees = rehearse_one(name, Path(scratch))
            except (RuntimeError, subprocess.SubprocessError) as error:
                print(error)
                agrees = False
        failed += [] if agrees else [name]
        sys.stdout.flush()
    return not failed


if __name__ == "__main__":
    sys.exit(not rehearse_each(sys.argv[1:] or list(CASES), rehearse))
