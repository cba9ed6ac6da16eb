"""Limits of the host, with the numbers given."""

from __future__ import annotations

import json
import math
import os
from pathlib import Path

import pytest

from mindspeed_rlxf.config.enums import DeviceKind
from mindspeed_rlxf.device.control_group import Amount, read_amount, read_memory_used
from mindspeed_rlxf.ops.doctor import disk, host, leftovers, local, network, software
from mindspeed_rlxf.ops.doctor.findings import Finding
from mindspeed_rlxf.ops.doctor.subject import Subject

GIB = 1024**3


def status(finding: Finding) -> str:
    return finding.status.value


RAYLET = ["/ray/core/src/ray/raylet/raylet --a", "python x.py raylet"]
OWN_RAYLET = ["/r/raylet --t=/tmp/rlxf-ray-1/x"]


@pytest.mark.parametrize(
    ("found", "word"),
    [
        (host.open_files((32768, 32768)), "ok"),
        (host.open_files((-1, -1)), "ok"),
        (host.open_files((1024, 4096)), "warning"),
        (host.shared_memory(2 * GIB, free=2 * GIB), "ok"),
        (host.shared_memory(2 * GIB, free=64 * 1024**2), "warning"),
        (host.memory(100 * GIB, 1 * GIB), "error"),
        (host.memory(100 * GIB, 5 * GIB), "warning"),
        (host.memory(100 * GIB, 50 * GIB), "ok"),
        (host.clock(0.0), "error"),
        (host.text_encoding("ISO-8859-1"), "warning"),
        (host.text_encoding("UTF-8"), "ok"),
        (host.text_encoding("utf8"), "ok"),
        (software.python_finding((3, 9, 1)), "error"),
        (disk._file_clock(Path("/x"), before=100.0, written=100.5, after=101.0), "ok"),
        (disk._file_clock(Path("/x"), before=100.0, written=110.0, after=101.0), "warning"),
        (leftovers.check_processes(RAYLET, is_joined=False), "warning"),
        (leftovers.check_processes(RAYLET, is_joined=True), "ok"),
        (leftovers.check_processes(2 * RAYLET, is_joined=True), "warning"),
        (leftovers.check_processes(OWN_RAYLET, is_joined=False), "ok"),
    ],
)
def test_a_check_is_judged_by_its_limit(found: Finding, word: str) -> None:
    assert status(found) == word
    assert bool(found.remedy) == (word != "ok")


@pytest.mark.parametrize("variable", ["RAY_ADDRESS", "RAY_RAYLET_PID"])
def test_the_cluster_that_is_looked_at_is_none_of_the_leftovers(
    variable: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ray sets the second variable in its workers."""
    monkeypatch.setattr(leftovers, "_own_commands", lambda: iter(RAYLET))
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    assert status(leftovers.check_leftovers()[0]) == "warning"
    monkeypatch.setenv(variable, "1")
    assert status(leftovers.check_leftovers()[0]) == "ok"


@pytest.mark.parametrize(
    ("value", "word"), [("4", "ok"), ("4, 2", "ok"), ("\u00b2", "warning"), ("0", "warning")]
)
def test_threads_are_whole_numbers(monkeypatch: pytest.MonkeyPatch, value: str, word: str) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", value)
    assert status(host.threads()) == word


def test_values_and_remedies_name_the_numbers() -> None:
    assert "ulimit -n 32768" in host.open_files((1024, 4096)).remedy
    assert "the hard limit is 4096" in host.open_files((1024, 4096)).remedy
    assert "hard limit" not in host.open_files((1024, -1)).remedy
    found = host.shared_memory(2 * GIB, free=64 * 1024**2)
    assert found.value == "64.0 MiB free in /dev/shm, Ray's object store takes 2.0 GiB"
    assert "9.0 s off" in disk._file_clock(Path("/x"), 100.0, 110.0, 101.0).value


LIMITED = {
    2: {
        "cpu.max": "150000 100000", "memory.max": "9000", "pids.max": "500", "pids.current": "100",
        "memory.current": "8000", "memory.stat": "anon 900\ninactive_file 7000\nfile 9",
    },
    1: {
        "cpu/cpu.cfs_quota_us": "150000", "cpu/cpu.cfs_period_us": "100000",
        "memory/memory.limit_in_bytes": "9000", "pids/pids.max": "500", "pids/pids.current": "100",
        "memory/memory.usage_in_bytes": "8000",
        "memory/memory.stat": "inactive_file 1\ntotal_inactive_file 7000",
    },
}  # fmt: skip
UNLIMITED = {
    2: {"cpu.max": "max 100000", "memory.max": "max", "pids.max": "max"},
    1: {
        "cpu/cpu.cfs_quota_us": "-1", "pids/pids.max": "max",
        "memory/memory.limit_in_bytes": "9223372036854771712",
    },
}  # fmt: skip


@pytest.mark.parametrize("version", [2, 1])
def test_limits_of_the_container_count(tmp_path: Path, version: int) -> None:
    def write(files: dict[str, str]) -> None:
        for name, text in files.items():
            (tmp_path / name).parent.mkdir(exist_ok=True)
            (tmp_path / name).write_text(f"{text}\n", encoding="ascii")

    write(LIMITED[version])
    assert status(host.processors(tmp_path)) == "warning"  # 1.5 processors
    assert host.pids(tmp_path).value == "100 in use of 500"
    assert read_amount(Amount.MEMORY_LIMIT, tmp_path) == 9000
    assert read_memory_used(tmp_path) == 1000
    write(UNLIMITED[version])
    assert status(host.pids(tmp_path)) == "ok"
    assert "container" not in host.processors(tmp_path).value
    assert read_amount(Amount.MEMORY_LIMIT, tmp_path) == math.inf


def test_writing_is_measured_and_leaves_nothing(tmp_path: Path) -> None:
    found = disk.write_speed(tmp_path, 2 * 1024**2)
    assert [f.check for f in found] == ["disk.write", "disk.clock"]
    assert "MiB/s" in found[0].value and list(tmp_path.iterdir()) == []
    assert [status(f) for f in disk.write_speed(tmp_path / "not" / "there")] == ["error"]


def test_little_room_is_reported_for_the_nearest_folder(tmp_path: Path) -> None:
    found = disk.output_folder(tmp_path / "new" / "run", wanted=2**60)
    assert status(found[0]) == "warning" and str(tmp_path) in found[0].value


def test_folders_of_dead_clusters_are_counted(tmp_path: Path, monkeypatch) -> None:  # type: ignore[no-untyped-def]
    monkeypatch.setattr(leftovers, "MANY_BYTES", 100)
    for name in ("rlxf-ray-dead", "rlxf-ray-live"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "log").write_bytes(b"x" * 200)
    found = leftovers.check_folders(tmp_path, [f"raylet --temp={tmp_path}/rlxf-ray-live"])
    assert status(found) == "warning" and "1 dead session" in found.value
    assert found.remedy == f"rm -r {tmp_path}/rlxf-ray-dead"


def test_files_of_the_configuration_are_looked_for(tmp_path: Path) -> None:
    (tmp_path / "set_packed_a.bin").touch()
    there, gone = ("data.data_path", f"{tmp_path}/set_packed_*"), ("ref.load", "/no/model")
    assert [status(f) for f in local.file_findings([there])] == ["ok"]
    assert [(status(f), f.value) for f in local.file_findings([there, gone])] == [
        ("error", "missing: ref.load=/no/model")
    ]


def test_every_check_of_this_host_answers(tmp_path: Path) -> None:
    """Nothing is started and no network is needed; a check that failed would say so."""
    found = local.check_host(Subject(DeviceKind.CPU, str(tmp_path)))
    assert {f.check.partition(".")[0] for f in found} >= {
        "versions", "devices", "limits", "memory", "host", "disk", "network", "ports", "ray",
    }  # fmt: skip
    assert [f for f in found if "the check itself" in f.value] == []
    json.dumps([f.value for f in found])


EXISTING = {"lo": True, "eth0": True, "eth1": False, "docker0": True}


def interface_status(variable: str, value: str, several_hosts: bool) -> str:
    *named, _ = network.interface_findings(EXISTING, {variable: value}, several_hosts)
    (found,) = [f for f in named if f.check == f"network.{variable.lower()}"]
    return status(found)


@pytest.mark.parametrize(
    ("value", "several_hosts", "word"),
    [
        ("eth0", True, "ok"),
        ("lo", False, "ok"),
        ("lo", True, "error"),  # not shared
        ("eth1", True, "error"),  # down
        ("eth7", True, "error"),  # not there
    ],
)
def test_an_interface_has_to_exist_be_up_and_be_shared(
    value: str, several_hosts: bool, word: str
) -> None:
    assert interface_status("GLOO_SOCKET_IFNAME", value, several_hosts) == word


@pytest.mark.parametrize("value", ["eth", "=eth0", "^docker,lo"])
@pytest.mark.parametrize("wrong", ["=eth", "^eth,lo,docker", "^=eth0,eth1,docker0,lo"])
def test_prefixes_exact_names_and_exclusions_are_read(value: str, wrong: str) -> None:
    assert interface_status("HCCL_SOCKET_IFNAME", value, True) == "ok"
    assert interface_status("HCCL_SOCKET_IFNAME", wrong, True) == "error"


@pytest.mark.parametrize(("several_hosts", "word"), [(True, "warning"), (False, "ok")])
def test_several_candidates_need_a_choice_between_hosts(several_hosts: bool, word: str) -> None:
    candidates = {"lo": True, "eth0": True, "ib0": True}
    (found,) = network.interface_findings(candidates, {}, several_hosts)
    assert status(found) == word


def ports(listening: tuple[int, ...] = (), **environment: str) -> list[Finding]:
    return list(network.port_findings(environment, range(32768, 61000), listening))


HOST_PORTS, NPU_PORTS = "HCCL_HOST_SOCKET_PORT_RANGE", "HCCL_NPU_SOCKET_PORT_RANGE"


@pytest.mark.parametrize(
    ("environment", "words"),
    [
        ({HOST_PORTS: "61000-61050", NPU_PORTS: "61100-61150"}, ["ok", "ok"]),
        ({HOST_PORTS: "61000-61050", NPU_PORTS: "61050-61150"}, ["error", "error"]),
        ({HOST_PORTS: "many"}, ["error"]),
        ({HOST_PORTS: "60000-60050"}, ["warning"]),  # others may take them
        ({HOST_PORTS: "auto"}, []),
    ],
)
def test_port_ranges_are_readable_apart_and_free(
    environment: dict[str, str], words: list[str]
) -> None:
    assert [status(f) for f in ports(**environment)] == ["ok", *words]


def test_ports_in_use_and_few_local_ports_are_warnings() -> None:
    found = ports((61001, 61002), HCCL_HOST_SOCKET_PORT_RANGE="61000-61050")[1]
    assert status(found) == "warning" and "2 in use (61001, 61002)" in found.value
    (few,) = network.port_findings({}, range(32768, 33000), ())
    assert status(few) == "warning"


def test_the_kernels_table_of_listeners_is_read() -> None:
    import socket

    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        assert listener.getsockname()[1] in network.listening_ports()


def test_a_proxy_for_this_host_is_reported_without_its_password() -> None:
    proxy = {"http_proxy": "http://me:secret@proxy.site:3128", "no_proxy": "localhost"}
    found = network.proxy_finding(proxy)
    assert status(found) == "warning" and "secret" not in found.value + found.remedy
    assert found.value == "http_proxy=http://proxy.site:3128, also for 127.0.0.1"
    assert found.remedy == "export no_proxy=localhost,127.0.0.1"
    fine = {**proxy, "no_proxy": "localhost,127.0.0.1"}
    assert status(network.proxy_finding(fine)) == "ok"
    assert status(network.proxy_finding({"http_proxy": ""})) == "ok"


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("http://me:secret@proxy.site", "http://proxy.site"),
        ("http://me:secret@proxy.site:/path", "http://proxy.site"),
        ("http://me:secret@[fd00::1]:3128/", "http://[fd00::1]:3128"),
        ("http://[fd00::1]", "http://[fd00::1]"),
        ("http://me:secret@proxy.site:port", "(set)"),
        ("http://me:secret@proxy.site:70000", "(set)"),
        ("http://me:secret@[fd00", "(set)"),
        ("http://me:12#3@proxy.site", "(set)"),  # 12 begins the password, and is no port
        ("proxy.site:3128", "(set)"),
    ],
)
def test_a_proxy_is_shown_without_a_port_that_is_absent_or_wrong(url: str, shown: str) -> None:
    found = network.proxy_finding({"https_proxy": url, "no_proxy": "*"})
    assert found.value == f"https_proxy={shown}, not for this host"


def test_no_check_needs_more_than_its_deadline() -> None:
    subject = Subject(DeviceKind.CPU, os.getcwd())
    deadlines = {probe.name: probe.deadline_s for probe in local.probes(subject)}
    assert deadlines.pop("devices") <= 65  # torch_npu alone may take 40 s to load
    assert max(deadlines.values()) <= 30
