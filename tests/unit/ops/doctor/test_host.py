"""Limits of the host, with the numbers given."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from mindspeed_rlxf.config.enums import DeviceKind
from mindspeed_rlxf.ops.doctor import disk, host, leftovers, local, network, software
from mindspeed_rlxf.ops.doctor.findings import Finding, Status
from mindspeed_rlxf.ops.doctor.subject import Subject

GIB = 1024**3


def status(finding: Finding) -> str:
    return finding.status.value


def test_too_few_open_files_name_the_command_and_a_low_hard_limit() -> None:
    assert status(host.open_files((32768, 32768))) == "ok"
    assert status(host.open_files((-1, -1))) == "ok"
    found = host.open_files((1024, 4096))
    assert status(found) == "warning" and "ulimit -n 32768" in found.remedy
    assert "the hard limit is 4096" in found.remedy
    assert "hard limit" not in host.open_files((1024, -1)).remedy


def test_shared_memory_of_a_docker_default_is_too_small_for_rays_store() -> None:
    found = host.shared_memory(2 * GIB, free=64 * 1024**2)
    assert status(found) == "warning" and "--shm-size" in found.remedy
    assert found.value == "64.0 MiB free in /dev/shm, Ray's object store takes 2.0 GiB"
    assert status(host.shared_memory(2 * GIB, free=2 * GIB)) == "ok"


@pytest.mark.parametrize(("free", "word"), [(1, "error"), (5, "warning"), (50, "ok")])
def test_memory_is_judged_by_what_is_left(free: int, word: str) -> None:
    assert status(host.memory(100 * GIB, free * GIB)) == word


def test_limits_of_the_container_count(tmp_path: Path) -> None:
    (tmp_path / "cpu.max").write_text("150000 100000", encoding="ascii")
    (tmp_path / "pids.max").write_text("500", encoding="ascii")
    (tmp_path / "pids.current").write_text("100", encoding="ascii")
    assert status(host.processors(tmp_path)) == "warning"  # 1.5 processors
    assert host.pids(tmp_path).value == "100 in use of 500"
    (tmp_path / "cpu.max").write_text("max 100000", encoding="ascii")
    (tmp_path / "pids.max").write_text("max", encoding="ascii")
    assert status(host.pids(tmp_path)) == "ok"
    assert "container" not in host.processors(tmp_path).value


def test_an_old_python_a_dead_clock_and_a_foreign_encoding_are_told() -> None:
    assert status(software.python_finding((3, 9, 1))) == "error"
    assert status(host.clock(0.0)) == "error"
    assert status(host.text_encoding("ISO-8859-1")) == "warning"
    assert status(host.text_encoding("UTF-8")) == status(host.text_encoding("utf8")) == "ok"


def test_writing_is_measured_and_leaves_nothing(tmp_path: Path) -> None:
    found = disk.write_speed(tmp_path, 2 * 1024**2)
    assert [f.check for f in found] == ["disk.write", "disk.clock"]
    assert "MiB/s" in found[0].value and list(tmp_path.iterdir()) == []


def test_a_folder_that_cannot_be_written_is_an_error(tmp_path: Path) -> None:
    found = disk.write_speed(tmp_path / "not" / "there")
    assert [status(f) for f in found] == ["error"]


def test_little_room_is_told_with_what_is_wanted(tmp_path: Path) -> None:
    found = disk.output_folder(tmp_path / "new" / "run", wanted=2**60)
    assert found[0].status is Status.WARNING and str(tmp_path) in found[0].value


def test_a_time_stamp_of_a_server_off_by_seconds_is_told() -> None:
    told = disk._file_clock(Path("/x"), before=100.0, written=110.0, after=101.0)
    assert status(told) == "warning" and "9.0 s off" in told.value
    assert status(disk._file_clock(Path("/x"), 100.0, 100.5, 101.0)) == "ok"


def test_stale_clusters_are_told_but_not_one_that_is_joined() -> None:
    lines = ["/ray/core/src/ray/raylet/raylet --a", "python x.py raylet"]
    assert status(leftovers.check_processes(lines, is_joined=False)) == "warning"
    assert status(leftovers.check_processes(lines, is_joined=True)) == "ok"
    assert status(leftovers.check_processes([*lines, *lines], is_joined=True)) == "warning"
    assert status(leftovers.check_processes(["/r/raylet --t=/tmp/rlxf-ray-1/x"], False)) == "ok"


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


def interfaces(environment: dict[str, str], several: bool = True) -> dict[str, str]:
    found = network.interface_findings(EXISTING, environment, several)
    return {f.check: status(f) for f in found}


def test_interfaces_that_variables_name_have_to_be_there_up_and_shared() -> None:
    gloo = "network.gloo_socket_ifname"
    assert interfaces({"GLOO_SOCKET_IFNAME": "eth0"})[gloo] == "ok"
    for wrong in ("eth7", "eth1", "lo"):  # not there, down, not shared
        assert interfaces({"GLOO_SOCKET_IFNAME": wrong})[gloo] == "error", wrong
    assert interfaces({"GLOO_SOCKET_IFNAME": "lo"}, several=False)[gloo] == "ok"


def test_prefixes_exact_names_and_exclusions_are_read() -> None:
    fine, wrong = (
        ("eth", "=eth0", "^docker,lo"),
        ("=eth", "^eth,lo,docker", "^=eth0,eth1,docker0,lo"),
    )
    for value in (*fine, *wrong):
        word = interfaces({"HCCL_SOCKET_IFNAME": value})["network.hccl_socket_ifname"]
        assert word == ("ok" if value in fine else "error"), value


def test_several_candidates_want_a_choice_between_hosts_only() -> None:
    there = {"lo": True, "eth0": True, "ib0": True}
    for several, word in ((True, "warning"), (False, "ok")):
        (found,) = network.interface_findings(there, {}, several)
        assert status(found) == word


def ports(listening: tuple[int, ...] = (), **environment: str) -> list[Finding]:
    return list(network.port_findings(environment, range(32768, 61000), listening))


def test_port_ranges_are_readable_apart_and_free() -> None:
    host, npu = "HCCL_HOST_SOCKET_PORT_RANGE", "HCCL_NPU_SOCKET_PORT_RANGE"
    fine = ports(**{host: "61000-61050", npu: "61100-61150"})
    assert [status(f) for f in fine] == ["ok", "ok", "ok"]
    assert [status(f) for f in ports(**{host: "61000-61050", npu: "61050-61150"})] == [
        "ok", "error", "error",
    ]  # fmt: skip
    assert status(ports(**{host: "many"})[1]) == "error"
    assert status(ports(**{host: "60000-60050"})[1]) == "warning"  # others may take them
    taken = ports((61001, 61002), **{host: "61000-61050"})[1]
    assert status(taken) == "warning" and "2 in use (61001, 61002)" in taken.value
    assert len(ports(**{host: "auto"})) == 1


def test_few_local_ports_are_told() -> None:
    (found,) = network.port_findings({}, range(32768, 33000), ())
    assert status(found) == "warning"


def test_the_kernels_table_of_listeners_is_read() -> None:
    import socket

    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        assert listener.getsockname()[1] in network.listening_ports()


def test_a_proxy_that_takes_our_own_addresses_is_told_without_its_password() -> None:
    proxy = {"http_proxy": "http://me:secret@proxy.site:3128", "no_proxy": "localhost"}
    found = network.proxy_finding(proxy)
    assert status(found) == "warning" and "secret" not in found.value + found.remedy
    assert found.value == "http_proxy=http://proxy.site:3128, also for 127.0.0.1"
    assert found.remedy == "export no_proxy=localhost,127.0.0.1"
    fine = {**proxy, "no_proxy": "localhost,127.0.0.1"}
    assert status(network.proxy_finding(fine)) == "ok"
    assert status(network.proxy_finding({"http_proxy": ""})) == "ok"


def test_no_check_needs_more_than_its_deadline() -> None:
    subject = Subject(DeviceKind.CPU, os.getcwd())
    deadlines = {probe.name: probe.deadline_s for probe in local.probes(subject)}
    assert deadlines.pop("devices") <= 65  # torch_npu alone may take 40 s to load
    assert max(deadlines.values()) <= 30
