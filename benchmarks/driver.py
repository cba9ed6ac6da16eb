"""Measure the driver's CPU time for each worker and phase, beside a bare call of a Ray actor.

The trainer, its role groups, metrics and files are real; the workers answer at once. First there
are 32 workers, processes of a pool with a world of its own; then 512 stand-ins, 64 to a process,
which answer without a world. Each iteration has nine phases. Between iterations the
driver calls bare actors, one for each process of the pool, that return their argument. It makes as
many calls as the trainer did, twice: each call after the answer to the last, which is the cost of
one bare call; and all calls of a phase before the first answer, where calls share the wake-ups of
Ray's threads. CPU time is that of the whole driver process, Ray's threads included. Prints one JSON
line. A real worker needs about 0.2 GiB and 3 s of CPU time to start.

    python benchmarks/driver.py [--workers 32] [--stand-ins 512] [--iterations 10]
"""

import argparse
import contextlib
import json
import os
import pickle
import resource
import statistics
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
os.environ["PYTHONPATH"] = os.pathsep.join([str(Path(__file__).resolve().parents[1])] * 2)

import numpy as np
import torch

from mindspeed_rlxf.checkpoint.directory import RunDirectory
from mindspeed_rlxf.cluster.interface import Reply, Request
from mindspeed_rlxf.cluster.refs import number_handles, resolve_refs
from mindspeed_rlxf.config.compose import compose
from mindspeed_rlxf.config.enums import DeviceKind
from mindspeed_rlxf.config.load import resolve
from mindspeed_rlxf.config.schema import DeviceConfig, RunConfig, RuntimeConfig
from mindspeed_rlxf.data.batch import RoleOutput, Rows
from mindspeed_rlxf.data.prompts import Prompt
from mindspeed_rlxf.roles.all_roles import RoleGroups
from mindspeed_rlxf.roles.reports import (
    ExperienceReport,
    GenerateReport,
    LogProbReport,
    ScoreReport,
    Summary,
    UpdateReport,
)
from mindspeed_rlxf.trainer.ppo import Iteration, PpoTrainer
from mindspeed_rlxf.trainer.prompt_source import PromptSource
from mindspeed_rlxf.trainer.recorder import Recorder
from mindspeed_rlxf.trainer.stopping import StopRequest

SAMPLES, RANKS_PER_PROCESS = 4, 64  # samples of a worker; stand-ins in a process
WARM = 2  # iterations that are not measured
NUMBERS = Summary(SAMPLES, 1.0, 1.0, 0.0)
STEP = {"pg_loss": 0.1, "pg_clipfrac": 0.0, "ppo_kl": 0.0, "entropy": 1.0, "grad_norm": 1.0}
VALUE_STEP = {"vf_loss": 0.1, "vf_clipfrac": 0.0, "vpred_mean": 0.0, "grad_norm": 1.0}


@dataclass(frozen=True)
class Blank(Rows):
    """Rows without meaning."""

    numbers: torch.Tensor  # [batch, response] fp32


class Role:
    """Stands in for every role: answers at once, with rows and reports of the usual size."""

    def __init__(self, *arguments: Any) -> None:
        """Take the length of a response, the only int among the arguments."""
        self.length = next(a for a in arguments if isinstance(a, int))

    def _rows(self, rows: Any) -> Blank:
        return Blank(torch.zeros(rows.num_rows, self.length))

    def update_weights(self, version: int) -> RoleOutput:
        return RoleOutput()

    def generate(self, prompts: Any, seed: int, sampling: Any) -> RoleOutput:
        count, lengths = prompts.num_rows, [self.length] * prompts.num_rows
        given = [16] * count, lengths, [True] * count
        return RoleOutput(self._rows(prompts), GenerateReport(*given, count, count, count, 0.0))

    def score(self, rollouts: Any) -> RoleOutput:
        scores = Blank(torch.zeros(rollouts.num_rows, 1))
        return RoleOutput(scores, ScoreReport([0.5] * rollouts.num_rows))

    def log_probs(self, rollouts: Any) -> RoleOutput:
        return RoleOutput(self._rows(rollouts), LogProbReport(NUMBERS))

    def values(self, rollouts: Any) -> RoleOutput:
        return RoleOutput(self._rows(rollouts))

    def make_experience(self, inputs: Any) -> RoleOutput:
        report = ExperienceReport([0.1] * inputs.rollouts.num_rows, *[NUMBERS] * 5)
        return RoleOutput(self._rows(inputs.rollouts), report)

    def update_policy(self, rollouts: Any, *rest: Any) -> RoleOutput:
        return RoleOutput(report=UpdateReport([STEP] * 2, 1e-5))

    def update_critic(self, rollouts: Any, *rest: Any) -> RoleOutput:
        return RoleOutput(report=UpdateReport([VALUE_STEP] * 2, 1e-5))


class ManyRanks:
    """Stands in for many ranks in one process."""

    def __init__(self, length: int) -> None:
        self.role = Role(length)

    def run_request(self, message: bytes, *rows: Rows) -> tuple[Rows | None, Reply]:
        """Run a request of the driver; answer at once if it builds a role or is for an engine."""
        request: Request = pickle.loads(message)
        if request.factory is not None or request.of_engine:
            return None, Reply(None, None, 0.0)
        args = resolve_refs(request.args, lambda handles: [rows[i] for i in handles])
        output = getattr(self.role, request.method)(*args)
        count = None if output.rows is None else output.rows.num_rows
        return output.rows, Reply(output.report, count, 0.0)


class Bare:
    """An actor that returns its argument."""

    def same(self, value: Any) -> Any:
        return value


class Measured(PpoTrainer):
    """Measures the CPU seconds of each iteration, and of as many bare calls after it."""

    def prepare(self, bare: list[Any], ray: Any) -> None:
        """Set the actors for bare calls and empty all counters; call it before `fit`."""
        from mindspeed_rlxf.cluster.ray import pool

        self.bare, self.ray = bare, ray
        self.submit, self.gather = pool.RayPool.submit, pool.gather
        # CPU seconds per call, one number for each iteration
        self.cpu: list[float] = []  # of the trainer
        self.main_cpu: list[float] = []  # of the trainer, in the main thread alone
        self.single_cpu: list[float] = []  # of bare calls, each after the answer to the last
        self.bare_cpu: list[float] = []  # of bare calls, a phase at once
        self.bare_main: list[float] = []  # of bare calls, a phase at once, in the main thread alone
        self.num_calls = self.num_phases = 0  # of the present iteration
        self.num_replies = self.bytes_out = self.bytes_in = 0

    def count_out(self, pool: Any, requests: Any, first_rank: int = 0) -> Any:
        """Submit a phase and count its calls; in the first iteration also the bytes of requests."""
        self.num_phases += 1
        self.num_calls += len(requests)
        if not self.cpu:
            sent = [each._replace(args=number_handles(each.args)[0]) for each in requests]
            self.bytes_out += sum(len(pickle.dumps(each)) for each in sent)
        return self.submit(pool, requests, first_rank)

    def count_in(self, calls: Any, timeout_s: float) -> list[Reply]:
        """Wait for replies and count them; in the first iteration also their bytes."""
        replies = self.gather(calls, timeout_s)
        self.num_replies += len(replies)
        if not self.cpu:
            self.bytes_in += sum(len(self.ray.cloudpickle.dumps(each)) for each in replies)
        return replies

    def _run_hooks(self, finished: Iteration) -> None:
        super()._run_hooks(finished)
        self.cpu.append((cpu_s() - self._began[0]) / self.num_calls)
        self.main_cpu.append((time.thread_time() - self._began[1]) / self.num_calls)
        self._bare_calls()
        requests = self.num_phases * self.actor.group.pool.world_size
        self.facts = {
            "phases": self.num_phases,
            "messages": self.num_calls + self.num_replies,
            "messages_per_worker_and_phase": (self.num_calls + self.num_replies) / requests,
            "bytes_of_request": self.bytes_out // requests,
            "bytes_of_reply": self.bytes_in // requests,
        }
        self.num_phases = self.num_calls = self.num_replies = 0

    def _bare_calls(self) -> None:
        """Make the calls of an iteration on bare actors: one at a time, then a phase at once."""
        size, actors, get = self.actor.group.pool.world_size, self.bare, self.ray.get
        count = self.num_phases * size
        began = cpu_s()
        for i in range(count):
            get(actors[i % len(actors)].same.remote(i))
        self.single_cpu.append((cpu_s() - began) / count)
        began, main = cpu_s(), time.thread_time()
        for _ in range(self.num_phases):
            get([actors[i % len(actors)].same.remote(i) for i in range(size)])
        self.bare_cpu.append((cpu_s() - began) / count)
        self.bare_main.append((time.thread_time() - main) / count)
        self._began = cpu_s(), time.thread_time()

    def fit(self) -> None:
        from mindspeed_rlxf.cluster.ray import pool

        self._began = cpu_s(), time.thread_time()
        with (
            patch.object(pool.RayPool, "submit", lambda *arguments: self.count_out(*arguments)),
            patch.object(pool, "gather", self.count_in),
        ):
            super().fit()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--workers", type=int, default=32)
    parser.add_argument("--stand-ins", type=int, default=512)
    parser.add_argument("--iterations", type=int, default=10)
    parser.add_argument(
        "--lengths", type=int, nargs="*", default=[64, 8192], help="response tokens, one run each"
    )
    parser.add_argument("--profile", action="store_true", help="print a cProfile of the driver")
    arguments = parser.parse_args()
    from mindspeed_rlxf.cluster.ray.runtime import RayRuntime, freeze_imports

    began = time.monotonic()
    runtime = RayRuntime(
        DeviceConfig(kind=DeviceKind.CPU),
        RuntimeConfig(timeout_s=300.0, start_timeout_s=580.0, address="local"),
        max(arguments.workers, 1),
        log_dir=Path(tempfile.mkdtemp()),
    )
    found: dict[str, Any] = {"ray_start_s": round(time.monotonic() - began, 1)}
    try:
        if arguments.workers:
            began = time.monotonic()
            pool = runtime.create_pools({"main": [arguments.workers]})["main"]
            found["workers_start_s"] = round(time.monotonic() - began, 1)
            found["worker_memory_mib"] = memory_mib(pool)
            for length in arguments.lengths:
                found[f"workers_{length}_tokens"] = measure(pool, length, arguments)
            pool.shutdown()
        freeze_imports()  # as `create_pools` does
        for length in arguments.lengths if arguments.stand_ins else ():
            pool = stand_in_pool(runtime, arguments.stand_ins, length)
            found[f"stand_ins_{length}_tokens"] = measure(pool, length, arguments)
            end_stand_ins(pool)
    finally:
        runtime.shutdown()
    facts = {"benchmark": "driver", "workers": arguments.workers, "cores": os.cpu_count()}
    print(json.dumps({**facts, "stand_ins": arguments.stand_ins, **found}))


def stand_in_pool(runtime: Any, size: int, length: int) -> Any:
    """Start a pool whose ranks are stand-ins, 64 to a process."""
    import ray

    from mindspeed_rlxf.cluster.nodes import Place
    from mindspeed_rlxf.cluster.ray.pool import RayPool

    ManyRanks.run_request = ray.method(num_returns=2, enable_task_events=False)(
        ManyRanks.run_request
    )  # type: ignore[method-assign]
    many = ray.remote(num_cpus=0)(ManyRanks)
    processes = [many.remote(length) for _ in range(-(-size // RANKS_PER_PROCESS))]
    actors = tuple(processes[rank // RANKS_PER_PROCESS] for rank in range(size))
    places = tuple(Place("host", "127.0.0.1", 0, ()) for _ in range(size))
    return RayPool("main", actors, places, None, None, runtime.timeout_s)


def memory_mib(pool: Any) -> int:
    """Return the median proportional set size of the workers: shared pages count in part."""
    import ray

    found = []
    pids = ray.get([actor.__ray_call__.remote(lambda worker: os.getpid()) for actor in pool.actors])
    for pid in pids:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text(encoding="ascii").splitlines()
        found.append(int(next(line for line in lines if line.startswith("Pss:")).split()[1]))
    return int(statistics.median(found)) // 1024


def end_stand_ins(pool: Any) -> None:
    """Kill the processes of a pool of stand-ins."""
    import ray

    for process in set(pool.actors):
        ray.kill(process)


def measure(pool: Any, length: int, arguments: argparse.Namespace) -> dict[str, Any]:
    """Train with stand-in roles on a pool; return the figures. length: of a response"""
    import ray

    with tempfile.TemporaryDirectory() as name:
        config = run_config(pool.world_size, Path(name), WARM + arguments.iterations)
        began = time.monotonic()
        roles = stand_in_roles(config, pool, length)
        built_s = time.monotonic() - began
        with contextlib.redirect_stdout(sys.stderr):  # the recorder keeps it
            trainer = make_trainer(config, roles)
        processes = len(set(pool.actors))
        actors = [ray.remote(num_cpus=0)(Bare).remote() for _ in range(processes)]
        ray.get([actor.same.remote(0) for actor in actors])
        trainer.prepare(actors, ray)
        if arguments.profile:
            fit_with_profile(trainer)
        else:
            trainer.fit()
        idle = idle_share()
        for actor in actors:
            ray.kill(actor)
    per_call = statistics.median(trainer.cpu[WARM:])
    bare = statistics.median(trainer.bare_cpu[WARM:])
    single = statistics.median(trainer.single_cpu[WARM:])
    return {
        **trainer.facts,
        "cpu_ms_per_worker_and_phase": round(per_call * 1e3, 3),
        "of_it_main_thread_ms": round(statistics.median(trainer.main_cpu[WARM:]) * 1e3, 3),
        "bare_call_cpu_ms": round(single * 1e3, 3),
        "ratio_to_bare_call": round(per_call / single, 2),
        "bare_calls_at_once_cpu_ms": round(bare * 1e3, 3),
        "of_it_bare_main_thread_ms": round(statistics.median(trainer.bare_main[WARM:]) * 1e3, 3),
        "ratio_to_bare_calls_at_once": round(per_call / bare, 2),
        "idle_cpu_ms_per_s": round(idle * 1e3, 1),
        "driver_memory_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024,
        "build_s": round(built_s, 1),
    }


def idle_share(seconds: float = 3.0) -> float:
    """Sleep, and return the driver's CPU seconds per second meanwhile: those of Ray's threads."""
    began = cpu_s()
    time.sleep(seconds)
    return (cpu_s() - began) / seconds


def fit_with_profile(trainer: Measured) -> None:
    """Train and print the profile of CPU time of the main thread to stderr."""
    import cProfile
    import pstats

    profile = cProfile.Profile(time.thread_time)
    with patch.object(trainer, "_bare_calls", lambda: None):
        profile.runcall(trainer.fit)
    pstats.Stats(profile, stream=sys.stderr).sort_stats("tottime").print_stats(30)
    pstats.Stats(profile, stream=sys.stderr).sort_stats("cumtime").print_stats(70)


def stand_in_roles(config: RunConfig, pool: Any, length: int) -> RoleGroups:
    """Build the role groups of a run, with stand-ins as roles."""
    from mindspeed_rlxf.cluster import group

    build = group.RoleGroup.build

    def build_stand_in(self: Any, factory: Any, *arguments: Any) -> Any:
        return build(self, Role, length)

    with patch.object(group.RoleGroup, "build", build_stand_in):
        return RoleGroups.build(config, {"main": pool}, [1])


def run_config(size: int, folder: Path, iterations: int) -> RunConfig:
    """Make the configuration of a run on `size` workers, with output below `folder`."""
    batch = size * SAMPLES
    keys = {
        "training.train_iters": iterations,
        "training.global_batch_size": batch,
        "training.output_dir": folder / "run",
        "actor_rollout.ppo_mini_batch_size": batch // 2,
        "actor_rollout.micro_batch_size": 2,
        "critic.critic_mini_batch_size": batch // 2,
        "critic.micro_batch_size": 2,
        "logging.samples": 0,
        "validation.interval": 0,
        "validation.after": False,
        "validation.before": False,
        "resource_pool.main": f"[{size}]",
        "runtime.address": "head:6379",  # a plan for other hosts: this one need not hold all
        "device.kind": "cpu",
    }
    tree = compose("ppo_trainer_tiny_rm", [f"{key}={value}" for key, value in keys.items()])
    return resolve(tree, "driver")


def make_trainer(config: RunConfig, roles: RoleGroups) -> Measured:
    """Make the trainer of a run, without checkpoints and validation."""
    prompts = [
        Prompt(i, "prompt", np.arange(2, 18), "truth", "source")
        for i in range(2 * config.training.global_batch_size)
    ]
    directory = RunDirectory.create(config)
    nothing: Any = SimpleNamespace(
        directory=directory,
        settle=lambda note: None,
        is_due=lambda *_: False,
        validate=lambda *_, **__: {},
    )
    recorder = Recorder(config, directory, None)
    source = PromptSource.from_config(config, prompts)
    stop = StopRequest(60.0)
    return Measured(config, roles, source, nothing, recorder, nothing, stop)


def cpu_s() -> float:
    """Return the CPU seconds of this process so far, all threads."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


if __name__ == "__main__":
    main()
