"""Samples that programs lead over HTTP: the rows of agents in the process, failures, ends."""

import contextlib
import hashlib
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest

from mindspeed_rlxf.agents import program_process
from mindspeed_rlxf.agents.program_process import ProgramPlan, ProgramRequest
from mindspeed_rlxf.agents.programs import close_programs
from mindspeed_rlxf.config.plugins import complete_program
from mindspeed_rlxf.config.problems import UserError
from mindspeed_rlxf.data.decoding import RewardTexts
from mindspeed_rlxf.data.tokenizer import load_tokenizer
from mindspeed_rlxf.rewards.workers import WorkerPool
from mindspeed_rlxf.roles.rollout import RolloutRole
from tests.golden.runs import START
from tests.processes import run_python
from tests.unit.agents import own_programs
from tests.unit.roles.test_conversations import Talk, generate, make_role
from tests.unit.roles.test_slices import prompts_of
from tests.unit.rollout.conftest import whole_model_decodes

__all__ = ["make_role", "whole_model_decodes"]  # fixtures
FILE = own_programs.__file__
EXAMPLES = Path(__file__).resolve().parents[3] / "examples" / "agent"
WAIT_S = 20.0


@pytest.fixture
def run_program(make_role: Any) -> Iterator[Any]:
    def run(run: Any, **keys: Any) -> RolloutRole:
        entry = complete_program("rollout.program", run)
        keys = {"turn_timeout_s": 60.0, "max_turns": 8, **keys}
        role: RolloutRole = make_role(None, agent=None, program=entry, **keys)
        return role

    yield run
    close_programs()


def same_conversations(ours: Any, theirs: Any) -> None:
    for name in ("response_ids", "rollout_log_probs", "trained_mask", "weights_version", "has_eos"):
        assert getattr(ours.rows, name).equal(getattr(theirs.rows, name)), name
    for one, other in zip(ours.report.records, theirs.report.records, strict=True):
        assert one.turns == other.turns and one.failure is None and one.score == other.score


@pytest.mark.parametrize("lag", [0, 2])
@pytest.mark.parametrize("function", ["talk", "talk_late"])
def test_a_program_leads_the_conversations_of_an_agent_in_the_process(
    make_role: Any, run_program: Any, function: str, lag: int
) -> None:
    prompts = prompts_of(0, 1, 2, 3)
    keys = {"agent_lag": lag, "turn_timeout_s": 60.0}
    ours, reports = generate(run_program(f"{FILE}:{function}", **keys), prompts)
    theirs, expected = generate(make_role(Talk(), **keys), prompts)
    same_conversations(ours, theirs)
    assert reports == expected, "each slice ended the same samples"


def test_fewer_processes_than_samples_lead_them_in_the_order_of_the_stream(
    make_role: Any, run_program: Any
) -> None:
    prompts = prompts_of(0, 1, 2)
    role = run_program(f"{FILE}:talk", program_processes=2)
    role.add(prompts, 5)
    order: list[int] = []
    while len(order) < 6:
        report: Any = role.advance(2).report
        order += sorted(ended.sample_id for ended in report.ended)
        assert role.conversations is not None
        assert len(role.conversations._conversations) <= 2
    assert set(order[:2]) <= {0, 1, 2} and order[-1] > 3
    theirs, _ = generate(make_role(Talk()), prompts)
    same_conversations(role.take(prompts.sample_ids), theirs)


COMMAND = """
import json, os, sys, urllib.request
row = json.load(sys.stdin)
body = json.dumps({"messages": row["messages"], "max_tokens": 2}).encode()
key = os.environ["OPENAI_API_KEY"]
head = {"Authorization": "Bearer " + key, "Content-Type": "application/json"}
url = os.environ["OPENAI_BASE_URL"]
for route, data in (("/chat/completions", body), ("/reward", b'{"score": 0.5}')):
    urllib.request.urlopen(urllib.request.Request(url + route, data, head), timeout=20)
sys.exit("key " + key if row["sample_id"] == 1 else 0)
"""


def test_a_command_reads_its_row_and_gives_its_reward(run_program: Any, tmp_path: Path) -> None:
    (tmp_path / "solve.py").write_text(COMMAND)
    role = run_program({"run": f"{sys.executable} solve.py", "folder": str(tmp_path)})
    records = generate(role, prompts_of(0, 1))[0].report.records
    assert [record.score for record in records] == [0.5] * 4
    assert [record.failure is None for record in records] == [True, False, True, True]
    assert records[1].failure.cause == "program" and records[1].failure.details == "key ***\n"


def test_what_a_command_has_started_ends_with_it() -> None:
    plan = ProgramPlan(None, "sh -c 'sleep 4246 & setsid sleep 4246 & sleep 0.2'", None, None)
    pool = WorkerPool(plan, 1, 60.0, -1, program_process.main, dict)
    request = ProgramRequest({}, "http://127.0.0.1:1/v1", "key")
    try:
        assert pool.submit(request).result(WAIT_S) == {"score": None, "parts": {}}
        assert not sleeping("4246")
    finally:
        pool.close()
        for process in sleeping("4246"):
            process.kill()


def test_what_a_function_has_started_ends_with_its_conversation(run_program: Any) -> None:
    try:
        records = generate(run_program(f"{FILE}:leave"), prompts_of(0))[0].report.records
        assert [record.failure for record in records] == [None, None]
        assert not sleeping("4247")
    finally:
        for process in sleeping("4247"):
            process.kill()


def test_a_function_stands_with_its_file_and_its_hash() -> None:
    entry = complete_program("rollout.program", f"{FILE}:talk")
    digest = hashlib.sha256(Path(FILE).read_bytes()).hexdigest()
    assert entry == {"run": f"{FILE}:talk", "sha256": digest}
    for wrong in ({**entry, "sha256": "0" * 64}, f"{FILE}:client", f"{FILE}:absent", "", '"'):
        with pytest.raises(UserError):
            complete_program("rollout.program", wrong)
    here = {"folder": os.getcwd(), "run": "python solve.py"}
    assert complete_program("rollout.program", "python solve.py") == here


def sleeping(seconds: str) -> list[psutil.Process]:
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if process.cmdline() == ["sleep", seconds] and process.status() != "zombie":
                found.append(process)
    return found


def wait_for(condition: Any) -> None:
    began = time.monotonic()
    while not condition():
        assert time.monotonic() - began < WAIT_S
        time.sleep(0.05)


def test_a_program_that_fails_masks_its_sample_and_ends(run_program: Any) -> None:
    role = run_program(f"{FILE}:misbehave", turn_timeout_s=3.0)
    output, _ = generate(role, prompts_of(0, 1, 2))
    failures = [record.failure for record in output.report.records]
    causes = [failure and failure.cause for failure in failures]
    assert causes == ["program", "program", "timeout", "rewrite", None, "program"]
    assert failures[0].message == "OSError: no database for ***"
    assert "misbehave" in failures[0].details and "SIGKILL" in failures[1].message
    trained = output.rows.trained_mask.any(1).tolist()
    assert trained == [False] * 4 + [True, False]
    wait_for(lambda: not sleeping("4243"))


def test_a_program_that_fails_as_no_turn_is_left_is_no_failure(run_program: Any) -> None:
    output, _ = generate(run_program(f"{FILE}:talk_on", max_turns=2), prompts_of(0))
    records = output.report.records
    assert [(record.failure, len(record.turns)) for record in records] == [(None, 2)] * 2
    assert not output.rows.has_eos.any() and output.rows.trained_mask.any(1).all()


DRIVER = """
from mindspeed_rlxf.agents.session import AGENTS, GIVES_FIRST
from mindspeed_rlxf.trainer import preflight
assert preflight and "program" in AGENTS and "program" in GIVES_FIRST
"""


def test_a_driver_without_roles_knows_the_agent() -> None:
    run_python("-c", DRIVER)


def test_programs_end_with_the_run(run_program: Any) -> None:
    role = run_program(f"{FILE}:outlive")
    assert role.agents is not None and role.conversations is not None
    role.add(prompts_of(0), 5)
    for sample in role.samples.pop_unstarted(None):
        role.agents.start(sample)
    wait_for(lambda: len(sleeping("4244")) == 2)
    close_programs()
    wait_for(lambda: not sleeping("4244"))


KILLED = """
import time
from mindspeed_rlxf.agents import program_process
from mindspeed_rlxf.agents.program_process import ProgramPlan, ProgramRequest
from mindspeed_rlxf.rewards.workers import WorkerPool
plan = ProgramPlan(None, "sleep 4245", None, None)
pool = WorkerPool(plan, 1, 60.0, -1, program_process.main, dict)
pool.submit(ProgramRequest({}, "", "key"))
time.sleep(60)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="PR_SET_PDEATHSIG is of Linux")
def test_a_command_ends_with_a_process_that_is_killed() -> None:
    with subprocess.Popen([sys.executable, "-c", KILLED]) as process:
        try:
            wait_for(lambda: sleeping("4245"))
        finally:
            process.kill()
    wait_for(lambda: not sleeping("4245"))


@pytest.mark.parametrize("kind", ["function", "command"])
def test_a_program_of_openais_client_leads_conversations(run_program: Any, kind: str) -> None:
    pytest.importorskip("openai", reason="the program uses the package openai")
    file = EXAMPLES / "openai_calculator.py"
    role = run_program(f"{file}:solve" if kind == "function" else f"{sys.executable} {file}")
    records = generate(role, prompts_of(0, 1))[0].report.records
    assert [record.failure for record in records] == [None] * 4
    assert {len(record.turns) for record in records} <= {1, 2}


TASKSET = """
import verifiers.v1 as vf

class Task(vf.Task[vf.TaskData]):
    @vf.reward
    async def answered(self, trace: vf.Trace) -> float:
        return 0.25 * len(trace.assistant_messages)

class Texts(vf.Taskset[Task]):
    def load(self):
        for text in {texts!r}:
            yield Task(vf.TaskData(prompt=text), self.config.task)

__all__ = ["Texts"]
"""


def test_an_environment_of_verifiers_leads_and_rewards_conversations(
    run_program: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("verifiers.v1", reason="the program uses the package verifiers")
    if shutil.which("uv") is None:
        pytest.skip("verifiers would install uv, which its harness uses")
    tokenizer, prompts = load_tokenizer(str(START)), prompts_of(0, 1)
    texts = [RewardTexts(tokenizer).prompt(ids.tolist()) for ids in prompts.token_ids]
    (tmp_path / "texts_taskset.py").write_text(TASKSET.format(texts=texts))
    monkeypatch.syspath_prepend(str(tmp_path))
    columns = [{"taskset": "texts_taskset", "task": task} for task in range(4)]
    role = run_program(f"{EXAMPLES / 'verifiers_program.py'}:play")
    output, _ = generate(role, replace(prompts, extra_infos=columns))
    records = output.report.records
    assert [(record.failure, record.score) for record in records] == [(None, 0.25)] * 4
