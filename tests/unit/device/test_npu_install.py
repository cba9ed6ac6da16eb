"""The checks of an installation on an NPU host find each fault and name its remedy.

A folder with the files that the vendor's guides name stands in for `/`, and the outputs that the
guides print stand in for npu-smi and hccn_tool.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import pytest

from mindspeed_rlxf.device import npu_install
from mindspeed_rlxf.device.driver import DriverDevice
from mindspeed_rlxf.device.npu_install import Checked, Host

BOARD = """
        NPU ID                         : 0
        Software Version               : 25.5.1
        Firmware Version               : 7.8.0.5.216
        Compatibility                  : {}
"""


def make_host(root: Path, **changed: str) -> Host:
    """A host on which every line is fine. changed: variables of the environment"""
    cann, atb = root / "cann", root / "atb"
    for name in (*npu_install.DEVICE_FILES, "/dev/davinci0", "/dev/davinci1"):
        touch(root / name.lstrip("/"))
    touch(root / npu_install.DRIVER_VERSION.lstrip("/")).write_text("Version=25.5.1\n")
    touch(root / npu_install.SET_ENV[0].lstrip("/"))
    (cann / "opp" / npu_install.KERNELS / "ascend910b").mkdir(parents=True)
    (cann / "python" / "site-packages").mkdir(parents=True)
    atb.mkdir()
    environment = {
        "LD_LIBRARY_PATH": f"{npu_install.DRIVER_LIBRARIES}/driver",
        "PYTHONPATH": str(cann / "python" / "site-packages"),
        "ASCEND_HOME_PATH": str(cann),
        "ATB_HOME_PATH": str(atb),
    }
    return Host(root, {**environment, **changed}, answer())


def touch(file: Path) -> Path:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.touch()
    return file


def answer(
    link: str = "UP", tls: str = "0", compatibility: str = "OK"
) -> Callable[[Sequence[str]], str]:
    """Outputs of the tools. link: of the last device; tls: of the last device"""

    def run(command: Sequence[str]) -> str:
        if command[0] == "npu-smi":
            return BOARD.format(compatibility)
        device, option = command[2], command[3]
        if option == "-link":
            return f"link status: {'UP' if device == '0' else link}\n"
        return f"dev_id:{device}, tls switch[{'0' if device == '0' else tls}](0:disable, 1:enable)"

    return run


def bad(found: Iterable[Checked]) -> dict[str, Checked]:
    return {each.name: each for each in found if not each.fine}


def everything(host: Host, several_hosts: bool = True) -> dict[str, Checked]:
    links = npu_install.check_links(host, [0, 1], several_hosts)
    return bad([*npu_install.check_driver(host), *npu_install.check_cann(host), *links])


def test_a_whole_installation_has_no_findings(tmp_path: Path) -> None:
    assert everything(make_host(tmp_path)) == {}


@pytest.mark.parametrize(
    ("missing", "check", "remedy"),
    [
        (npu_install.DRIVER_VERSION, "npu.driver", "then the firmware"),
        ("/dev/hisi_hdc", "npu.device_files", "--device /dev/hisi_hdc"),
        ("/dev/davinci_manager", "npu.device_files", "--device /dev/davinci_manager"),
    ],
)
def test_files_of_the_driver_that_are_missing_are_errors_with_the_mount(
    tmp_path: Path, missing: str, check: str, remedy: str
) -> None:
    host = make_host(tmp_path)
    host.path(missing).unlink()
    ((name, found),) = everything(host).items()
    assert (name, found.fatal) == (check, True)
    assert missing in found.value and remedy in found.remedy


def test_a_container_without_numbered_devices_is_an_error(tmp_path: Path) -> None:
    host = make_host(tmp_path)
    for number in (0, 1):
        host.path(f"/dev/davinci{number}").unlink()
    assert "/dev/davinci<N>" in everything(host)["npu.device_files"].value


def test_firmware_that_the_driver_does_not_fit_is_an_error(tmp_path: Path) -> None:
    host = make_host(tmp_path)._replace(run=answer(compatibility="NOK"))
    found = everything(host)["npu.firmware"]
    assert found.fatal and "7.8.0.5.216" in found.value and "NOK" in found.value


def test_a_tool_that_is_missing_is_named(tmp_path: Path) -> None:
    def run(command: Sequence[str]) -> str:
        raise ValueError(f"{command[0]} is not on PATH")

    found = bad(npu_install.check_driver(make_host(tmp_path)._replace(run=run)))
    assert found["npu.firmware"].value == "npu-smi is not on PATH"


@pytest.mark.parametrize("script", [*npu_install.SET_ENV, "/home/me/Ascend/cann/set_env.sh"])
def test_the_remedy_names_the_set_env_that_is_there(tmp_path: Path, script: str) -> None:
    """CANN 8.5 and later have it in `cann`, older ones in `ascend-toolkit`."""
    host = make_host(tmp_path, ASCEND_HOME_PATH="", HOME="/home/me")
    host.path(npu_install.SET_ENV[0]).unlink()
    touch(host.path(script))
    ((name, found),) = bad(npu_install.check_cann(host)).items()
    assert (name, found.fatal) == ("npu.set_env", True)
    assert f"source {script}" in found.remedy


def test_two_canns_in_one_environment_are_an_error(tmp_path: Path) -> None:
    host = make_host(tmp_path, ASCEND_TOOLKIT_HOME=str(tmp_path / "older"))
    found = everything(host)["npu.set_env"]
    assert found.fatal and str(tmp_path / "older") in found.value
    both = make_host(tmp_path / "b", ASCEND_TOOLKIT_HOME=str(tmp_path / "b" / "cann"))
    assert everything(both) == {}


@pytest.mark.parametrize(
    ("variable", "value", "check", "remedy"),
    [
        ("PYTHONPATH", "/somewhere/Megatron-LM", "npu.cann_python", "keep $PYTHONPATH"),
        ("LD_LIBRARY_PATH", "/usr/lib", "npu.driver_libraries", npu_install.DRIVER_LIBRARIES),
        ("ATB_HOME_PATH", "", "npu.atb", "install CANN's NNAL first"),
        ("ASCEND_OPP_PATH", "/nowhere", "npu.operators", "Ascend-cann-A3-ops"),
    ],
)
def test_an_environment_that_lost_a_part_is_named_with_its_remedy(
    tmp_path: Path, variable: str, value: str, check: str, remedy: str
) -> None:
    ((name, found),) = everything(make_host(tmp_path, **{variable: value})).items()
    assert name == check and remedy in found.remedy


def test_an_installed_atb_has_only_to_be_sourced(tmp_path: Path) -> None:
    host = make_host(tmp_path, ATB_HOME_PATH="")
    touch(host.path(npu_install.SET_ENV_ATB))
    assert "install" not in everything(host)["npu.atb"].remedy


def test_a_link_that_is_down_is_an_error_between_hosts_alone(tmp_path: Path) -> None:
    host = make_host(tmp_path)._replace(run=answer(link="DOWN"))
    found = everything(host)["npu.links"]
    assert found.fatal and "1: DOWN" in found.value and "-link -g" in found.remedy
    assert everything(host, several_hosts=False) == {}


def test_a_tool_that_does_not_tell_the_state_of_a_link_is_no_broken_cable(tmp_path: Path) -> None:
    tell = answer()

    def run(command: Sequence[str]) -> str:
        if command[2] == "1":
            raise ValueError("hccn_tool ended with 1: no right")
        return tell(command)

    host = make_host(tmp_path)._replace(run=run)
    found = bad(npu_install.check_links(host, [0, 1], several_hosts=True))
    assert list(found) == ["npu.links"] and not found["npu.links"].fatal
    assert found["npu.links"].value == "hccn_tool did not tell the state of 1"
    assert bad(npu_install.check_links(host, [0, 1], several_hosts=False)) == {}


def test_links_of_different_encryption_are_an_error(tmp_path: Path) -> None:
    host = make_host(tmp_path)._replace(run=answer(tls="1"))
    assert everything(host)["npu.tls"].value == "switch 0, 1"


def test_without_hccn_tool_several_hosts_are_told_what_to_mount(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(npu_install.shutil, "which", lambda name: None)
    monkeypatch.setattr(npu_install, "HCCN_TOOL", "/nowhere/hccn_tool")
    (found,) = npu_install.check_links(Host(), [0], several_hosts=True)
    assert not found.fine and "/etc/hccn.conf" in found.remedy
    (alone,) = npu_install.check_links(Host(), [0], several_hosts=False)
    assert alone.fine


def cards(*numbers: int) -> Checked:
    devices = [DriverDevice(i, "910", "OK", 1, 0, card) for i, card in enumerate(numbers)]
    return npu_install.describe_cards(devices)


def test_a_card_of_two_dies_is_two_devices() -> None:
    assert cards(0, 1).value.startswith("2 cards, 1 device on each")
    a3 = cards(0, 0, 1, 1)
    assert a3.fine and "2 cards, 2 devices on each: `--resources='{\"NPU\": 4}'`" in a3.value
    for uneven in (cards(0, 0, 1), cards(0, 1, 1, 1)):
        assert not uneven.fine and "both" in uneven.remedy
    assert cards(0, 1, 1, 1).value.startswith("2 cards, 1-3 devices on each")
