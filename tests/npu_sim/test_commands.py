"""Commands of users give the same results on a simulated NPU as on a CPU."""

import os
import sys

import pytest

from tests.distributed.test_bf16 import BAND
from tests.golden.runs import SETTINGS, SMALL, START
from tests.npu_sim import ray_run, run
from tests.npu_sim.processes import environment
from tests.processes import ROOT, read_metrics

pytestmark = pytest.mark.long
ITERATIONS = 3
VALIDATED = {"data.val_files": START / "prompts.jsonl", "validation.interval": 1}


def finish(name, scratch, kind, changes, stopped=False):
    """Run `ray_gpt.py` with `runtime: local` to the end; return the run directory.

    kind:    cpu or sim
    stopped: stop the run by SIGTERM after its first iteration, and resume it
    """
    base, settings = SETTINGS[name]
    # The critic has a tenth of its rate: the length of Adam's first steps does not depend on the
    # gradient's size, so rounding errors moved a weight by 1.6e-5 with the usual rate.
    rate = {"critic.lr": 1e-4} if base.startswith("ppo") else {}
    out, log = scratch / f"{kind} run", scratch / f"{kind}.log"
    keys = {
        **SMALL, **settings, **rate, "training.train_iters": ITERATIONS,
        "training.output_dir": out, "device.kind": "cpu" if kind == "cpu" else "npu",
        "runtime.kind": "local", **changes,
    }  # fmt: skip
    line = [sys.executable, "ray_gpt.py", "--config-name", base]
    line += [f"{key}={value}" for key, value in keys.items()]
    where = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    if kind == "sim":
        where = environment(scratch, 1, RLXF_SIM_DELAYED="1")
    codes = []
    if stopped:
        stop = ray_run.run_command(line, where, log, out / "metrics.jsonl")
        codes.append(stop - ray_run.STOPPED)
    codes.append(ray_run.run_command(line, where, log))
    assert not any(codes), f"{codes}\n{log.read_text()[-6000:]}"
    return out


@pytest.mark.parametrize(("name", "changes", "stopped"), [
    ("gae", VALIDATED, False), ("gae", {"training.train_iters": 5}, True),
    ("gae_full_kl", {}, False), ("grpo", {}, False), ("online_dpo", {}, False),
])  # fmt: skip
def test_a_run_equals_that_on_cpu(simulated, tmp_path, name, changes, stopped):
    ours = finish(name, tmp_path, "cpu", changes)
    theirs = finish(name, tmp_path, "sim", changes, stopped)
    assert ray_run.read_samples(ours) == ray_run.read_samples(theirs)
    assert max(by for _, by in run.result_differences(ours, theirs)) <= run.TOLERANCE
    lines = read_metrics(theirs)
    assert any(key.startswith("val") for key in lines[-1]) == (changes is VALIDATED)
    wanted = changes.get("training.train_iters", ITERATIONS)
    assert len(lines) == wanted + (changes is VALIDATED)  # validated before the first one
    assert not stopped or len(list((theirs / "checkpoints").glob("iter_*"))) > 1


def test_bf16_stays_in_the_band_of_fp32(simulated, tmp_path):
    curves = []
    for kind, bf16 in (("cpu", False), ("sim", True)):
        rate = {"critic.lr": 1e-3}  # the usual one, which the band was measured with
        changes = {"training.bf16": bf16, "training.train_iters": 8, **rate}
        curves.append(read_metrics(finish("gae", tmp_path, kind, changes)))
    apart = {
        key: sum(abs(a[key] - b[key]) for a, b in zip(*curves, strict=True)) / len(curves[0])
        for key in BAND
    }
    assert apart == {key: pytest.approx(0, abs=limit) for key, limit in BAND.items()}


@pytest.mark.parametrize("name", ray_run.CASES)
def test_a_run_on_ray_with_npus_equals_that_on_cpu(simulated, name):
    assert run.rehearse_each([name], ray_run.rehearse, "/var/tmp")  # sockets: short paths
