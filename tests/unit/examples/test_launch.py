"""The launchers start Ray everywhere, wait, train, pass on signals and exit codes, and end it all.

`ssh`, `srun`, `scontrol` and the interpreter are stand-ins: Ray's head is a port that listens.
"""

import os
import signal
import socket
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import pytest
import yaml

from mindspeed_rlxf.ops.supervisor import SHUTDOWN_S

FOLDER = Path(__file__).parents[3] / "examples" / "launch"
# In place of the interpreter: `$LAB` collects what was called and who is there.
PYTHON = """#!/usr/bin/env bash
echo "$*" >> "$LAB/calls"
rights=$(stat -c %a "$RAY_TMPDIR")
echo "${RAY_AUTH_MODE:-} ${RAY_AUTH_TOKEN:-} $rights $RAY_TMPDIR" >> "$LAB/tokens"
case "$*" in
  *--head*) [ -z "${NO_HEAD:-}" ] || exit 1
    exec "$REAL" -S -c 'import socket, sys
s = socket.create_server(("127.0.0.1", int(sys.argv[1])))
while True: s.accept()[0].close()' "$MASTER_PORT" ;;
  *start*--address*)
    [ -z "${NO_NODE:-}" ] || { echo "no Ray here" >&2; exit 1; }
    trap 'rm "$LAB/node_$$"; exit 0' TERM; touch "$LAB/node_$$"
    while true; do sleep 0.1; done ;;
  -\\ *) cat > /dev/null; joined=$(ls "$LAB" | grep -c node_)
    echo $(((joined + 1) * DEVICES_PER_NODE)) ;;
  *ray_gpt.py*) echo "$RAY_ADDRESS" > "$LAB/address"
    trap 'touch "$LAB/stopping"; sleep 0.3; exit 75' TERM
    touch "$LAB/training"
    [ -z "${NO_HANDLER:-}" ] || exec sleep 30
    [ -z "${ENDLESS:-}" ] || for _ in $(seq 300); do sleep 0.1; done
    exit "${CODE:-0}" ;;
esac
"""
SSH = """#!/usr/bin/env bash
while [ "$1" = -o ]; do shift 2; done
echo "$1" >> "$LAB/hosts"; shift; exec bash -c "$*"
"""
SRUN = """#!/usr/bin/env bash
echo "$*" >> "$LAB/srun"
while [[ $1 == --* ]]; do case $1 in --ntasks=*) n=${1#*=} ;; esac; shift; done
for _ in $(seq "$n"); do "$@" & done
wait
"""
SCONTROL = """#!/usr/bin/env bash
echo "$*" >> "$LAB/scontrol"
[ "$1" != show ] || printf '%s\\n' localhost node2 node3
"""


@dataclass
class Lab:
    folder: Path
    environment: dict[str, str]

    def start(self, script: str, *arguments: str, **variables: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            ["bash", str(FOLDER / script), *arguments], env={**self.environment, **variables},
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True,
        )  # fmt: skip

    def run(self, script: str, *arguments: str, **variables: str) -> tuple[int, str]:
        process = self.start(script, *arguments, **variables)
        output = process.communicate(timeout=20)[0]
        return process.returncode, output

    def lines(self, name: str) -> list[str]:
        return (self.folder / name).read_text().splitlines()

    def left(self) -> list[str]:
        """Return the processes of this lab that still run after 10 s: one may be about to end."""
        deadline = time.monotonic() + 10
        while (found := self._running()) and time.monotonic() < deadline:
            time.sleep(0.02)
        return found

    def _running(self) -> list[str]:
        found = []
        for entry in Path("/proc").iterdir():
            try:
                if entry.name.isdigit() and f"LAB={self.folder}".encode() in (
                    entry / "environ"
                ).read_bytes().split(b"\0"):
                    found.append((entry / "cmdline").read_text())
            except OSError:
                continue
        return found


@pytest.fixture
def lab(tmp_path: Path) -> Lab:
    tools = tmp_path / "tools"
    tools.mkdir()
    for name, text in (("ssh", SSH), ("srun", SRUN), ("scontrol", SCONTROL), ("py", PYTHON)):
        (tools / name).write_text(text)
        (tools / name).chmod(0o755)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    environment = {
        "PATH": f"{tools}:{os.environ['PATH']}", "LAB": str(tmp_path), "REAL": sys.executable,
        "PYTHON": str(tools / "py"), "DEVICE": "cpu", "DEVICES_PER_NODE": "2",
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WAIT_S": "20", "LOOK_S": "0.1",
        "POLL_S": "0.1", "HOSTS": "node1 node2 node3", "SLURM_JOB_NODELIST": "node[1-3]",
        "SLURM_JOB_ID": "9000",  # divisible by 1000: leaves the port as it is
        "SLURM_SUBMIT_DIR": str(FOLDER.parents[1]),
    }  # fmt: skip
    return Lab(tmp_path, environment)


BOTH = pytest.mark.parametrize("script", ["ssh/train.sh", "slurm/train.sbatch"])


@BOTH
def test_ray_starts_on_all_nodes_and_ends_with_the_run(lab: Lab, script: str) -> None:
    code, output = lab.run(script, "--config-name", "tiny", "training.train_iters=3")
    assert code == 0, output
    head, *rest = lab.lines("calls")
    assert "--head" in head and '--resources={"rlxf_cpu": 2}' in head
    port = lab.environment["MASTER_PORT"]
    nodes = [call for call in rest if f"--address=127.0.0.1:{port}" in call]
    assert len(nodes) == 2 and all('--resources={"rlxf_cpu": 2}' in call for call in nodes)
    assert rest[-1].endswith(
        "ray_gpt.py --config-name tiny training.train_iters=3 device.kind=cpu "
        "device.devices_per_node=2"
    )
    assert lab.lines("address") == [f"127.0.0.1:{port}"]
    assert lab.left() == []


@BOTH
def test_ray_asks_for_a_token_that_no_command_line_has(lab: Lab, script: str) -> None:
    code, output = lab.run(script, "--config-name", "tiny")
    assert code == 0, output
    words = [line.split() for line in lab.lines("tokens")]
    assert len(words) >= 5  # head, two nodes, devices, run
    assert {(mode, rights) for mode, _, rights, _ in words} == {("token", "700")}
    (token,) = {token for _, token, _, _ in words}
    assert len(token) == 64 and int(token, 16)
    seen = [output, *lab.lines("calls")]
    seen += [line for name in ("hosts", "srun") if (lab.folder / name).exists()
             for line in lab.lines(name)]  # fmt: skip
    assert [line for line in seen if token in line] == []
    assert {Path(folder).exists() for *_, folder in words} == {False}
    assert "--include-dashboard=false" in lab.lines("calls")[0]


def test_each_host_is_reached_once_and_the_first_is_this_one(lab: Lab) -> None:
    (lab.folder / "list").write_text("# ours\nnode1 slots=2\n\nnode2 slots=2\n")
    code, output = lab.run(
        "ssh/train.sh", "--config-name", "tiny", HOSTS="", HOST_FILE=str(lab.folder / "list")
    )
    assert code == 0, output
    assert lab.lines("hosts") == ["node2"]


def test_srun_starts_one_task_on_each_other_node(lab: Lab) -> None:
    assert lab.run("slurm/train.sbatch", "--config-name", "tiny")[0] == 0
    (call,) = lab.lines("srun")
    assert "--nodes=2 --ntasks=2 " in call and "--nodelist=node2,node3 " in call


def test_the_exit_code_is_that_of_the_run(lab: Lab) -> None:
    assert lab.run("ssh/train.sh", "--config-name", "tiny", CODE="2")[0] == 2
    assert lab.left() == []


def stop_training(lab: Lab, script: str, **variables: str) -> tuple[int, str]:
    """Start the script, send it SIGTERM while it trains, and return its exit code and output."""
    process = lab.start(script, "--config-name", "tiny", ENDLESS="1", **variables)
    deadline = time.monotonic() + 30
    while not (lab.folder / "training").exists():
        assert time.monotonic() < deadline and process.poll() is None
        time.sleep(0.02)
    process.send_signal(signal.SIGTERM)
    output = process.communicate(timeout=20)[0]
    return process.returncode, output


@pytest.mark.parametrize(
    "script",
    ["ssh/train.sh", "slurm/train.sbatch", "../mcore/llama3/ray_ppo_llama3_8b_1node.sh",
     "../mcore/llama3/ray_ppo_llama3_8b_multi_node.sh"],
)  # fmt: skip
def test_a_signal_lets_the_run_stop_by_itself(lab: Lab, script: str) -> None:
    token = {"RAY_AUTH_TOKEN": "00112233" * 8} if "multi" in script else {}
    code, output = stop_training(lab, script, **token)
    assert (code, (lab.folder / "stopping").exists()) == (75, True), output
    assert lab.left() == []
    if script.startswith("slurm"):
        assert lab.lines("scontrol")[-1] == "requeue 9000"


def test_a_signal_that_the_starting_run_cannot_handle_is_a_stop_too(lab: Lab) -> None:
    script = "../mcore/llama3/ray_ppo_llama3_8b_1node.sh"
    code, output = stop_training(lab, script, NO_HANDLER="1")
    assert (code, lab.left()) == (75, []), output


@pytest.mark.parametrize("script", ["ssh/train.sh", "slurm/train.sbatch"])
def test_a_signal_while_the_host_is_prepared_is_a_stop(lab: Lab, script: str) -> None:
    cann = lab.folder / "set_env.sh"
    cann.write_text('touch "$LAB/training"; sleep 1\n')
    code, output = stop_training(lab, script, DEVICE="npu", CANN_ENV=str(cann))
    assert (code, lab.left()) == (75, []), output
    assert not (lab.folder / "calls").exists()  # no Ray


def test_the_exit_code_of_a_run_that_ends_during_the_signal_is_kept(lab: Lab) -> None:
    script = lab.folder / "wait.sh"
    script.write_text(f"""source {FOLDER}/../mcore/common.sh
"$PYTHON" ray_gpt.py &
trap "kill -TERM $!; wait $!; sleep 0.1" TERM
wait_for_end $!
""")
    code, output = stop_training(lab, str(script), RAY_ADDRESS="", RAY_TMPDIR=str(lab.folder))
    assert (code, lab.left()) == (75, []), output


def test_a_job_is_requeued_only_when_the_same_command_may_go_on(lab: Lab) -> None:
    for code, variables in ((1, {}), (0, {}), (75, {"REQUEUE": "0"})):
        assert lab.run("slurm/train.sbatch", "-x", CODE=str(code), **variables)[0] == code
    assert not any("requeue" in line for line in lab.lines("scontrol"))


@pytest.mark.parametrize(
    ("script", "variables", "code", "message"),
    [
        ("ssh/train.sh", {"NO_NODE": "1"}, 2, "a node did not start Ray"),
        ("slurm/train.sbatch", {"NO_NODE": "1"}, 2, "a node did not start Ray"),
        ("ssh/train.sh", {"NO_HEAD": "1"}, 2, "error: Ray did not start"),
        ("ssh/train.sh", {"DEVICES": "9", "WAIT_S": "2"}, 75,
         "stopped: 6 of 9 devices joined within WAIT_S=2 s"),
        ("ssh/train.sh", {"HOSTS": ""}, 2, "error: HOSTS must name the hosts"),
        ("slurm/train.sbatch", {"SLURM_SUBMIT_DIR": "/"}, 2,
         "must be the folder of mindspeed_rlxf"),
    ],
)  # fmt: skip
def test_what_is_missing_is_named_and_nothing_is_left_running(
    lab: Lab, script: str, variables: dict[str, str], code: int, message: str
) -> None:
    found, output = lab.run(script, "--config-name", "tiny", **variables)
    assert found == code and message in output
    assert not (lab.folder / "training").exists() and lab.left() == []


def test_the_ray_job_of_kuberay_is_whole() -> None:
    spec = yaml.safe_load((FOLDER / "kuberay/rayjob.yaml").read_text(encoding="utf-8"))["spec"]
    cluster = spec["rayClusterSpec"]
    (group,) = cluster["workerGroupSpecs"]
    assert group["replicas"] == group["minReplicas"] == group["maxReplicas"]
    devices = group["template"]["spec"]["containers"][0]["resources"]["limits"]
    per_node = next(int(n) for name, n in devices.items() if "huawei.com" in name)
    assert group["rayStartParams"]["resources"] == f'"{{\\"NPU\\": {per_node}}}"'
    head = cluster["headGroupSpec"]["template"]
    variables = {each["name"]: each["value"] for each in head["spec"]["containers"][0]["env"]}
    stop_s = int(variables["RAY_JOB_STOP_WAIT_TIME_S"])  # Ray kills the command after that
    assert 60 + SHUTDOWN_S < stop_s < head["spec"]["terminationGracePeriodSeconds"]
    for template in (head, group["template"]):
        pod = template["spec"]
        assert pod["terminationGracePeriodSeconds"] > 60  # training.stop_grace_s
        mounts = {mount["name"] for mount in pod["containers"][0]["volumeMounts"]}
        assert mounts == {volume["name"] for volume in pod["volumes"]}
