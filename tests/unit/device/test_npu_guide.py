"""docs/npu.md and the doctor name the same checks, each with a source."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from mindspeed_rlxf.device import npu_install, npu_python, npu_sets

GUIDE = Path(__file__).parents[3] / "docs" / "npu.md"
TEXT = GUIDE.read_text(encoding="utf-8")
STEPS, _, SOURCES = TEXT.partition("\n## Sources\n")
STEPS = STEPS.partition("\n## Install\n")[2].partition("\n## What a process does\n")[0]
ROWS = [[cell.strip() for cell in line.strip("|").split(" | ")] for line in SOURCES.splitlines()]
ROWS = [row for row in ROWS if len(row) == 3 and not row[0].startswith(("what", "--"))]
NAMED = "\n".join(row[0] for row in ROWS)
CHECKERS = [Path(module.__file__) for module in (npu_install, npu_python) if module.__file__]
PLACE = re.compile(r"(?<![\w$.}>])/(?:usr|dev|etc|MindSpeed|Megatron-LM)\b[\w./-]*\w")
ADDRESS = re.compile(r"https://[\w./-]+\w")
VERSION = re.compile(
    r"(?<![\w.])\d+\.\d+(?:\.(?:\d+|post\d+|RC\d+))+(?:\.post\d+)?(?:\+cpu)?"  # 2.7.1.post8
    r"|\b(?:core|26\.[01]\.0_core)_[rv][\d.]+\d"  # branches and tags
    r"|\b[0-9a-f]{40}\b"
)
PACKAGE = re.compile(r"Ascend-cann-[\w.-]+\w")
# Commands of this package, the shell and git; all others need a row.
OWN = {"make", "python", "mindspeed-rlxf", "export", "source", "git", "cat", "ls", "bash", "ulimit"}


def commands(text: str) -> Iterator[str]:
    """First words of the commands in code blocks, lines that go on joined."""
    for block in re.findall(r"```\w*\n(.*?)```", text, re.DOTALL):
        for line in block.replace("\\\n", " ").splitlines():
            for part in re.split(r" ; |#.*", line):
                if words := part.split():
                    yield words[0]


def names(text: str) -> set[str]:
    """Paths, addresses, versions and packages in a text."""
    patterns = (PLACE, ADDRESS, VERSION, PACKAGE)
    return {match.rstrip(".") for pattern in patterns for match in pattern.findall(text)}


def unsourced(text: str) -> set[str]:
    return names(text) - names(NAMED)


def test_every_row_has_what_where_and_when() -> None:
    assert len(ROWS) > 20
    for what, where, date in ROWS:
        assert what and where and re.fullmatch(r"20\d\d-\d\d-\d\d", date), what


def test_paths_versions_and_addresses_of_the_guide_have_a_source() -> None:
    assert unsourced(STEPS) == set()


def test_commands_of_the_guide_have_a_source() -> None:
    used = {Path(word).name for word in commands(STEPS)} - OWN
    assert {"npu-smi", "docker", "pip", "hccn_tool", "ray", "hf"} <= used, "blocks were not read"
    assert {word for word in used if not re.search(rf"\b{re.escape(word)} ", NAMED)} == set()


@pytest.mark.parametrize("file", CHECKERS, ids=lambda file: file.stem)
def test_paths_and_packages_of_the_doctor_have_a_source(file: Path) -> None:
    tree = ast.parse(file.read_text(encoding="utf-8"))
    texts = [
        node.value
        for node in ast.walk(tree)
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    ]
    assert unsourced("\n".join(texts)) == set()


def test_the_guide_and_the_doctor_name_the_same_checks() -> None:
    checks = {
        name
        for file in CHECKERS
        for name in re.findall(r'"(npu\.[a-z_]+)"', file.read_text(encoding="utf-8"))
    }
    assert set(re.findall(r"`(npu\.[a-z_]+)`", STEPS)) == checks


def test_the_guide_names_the_sets_and_what_was_not_tried() -> None:
    for each in npu_sets.SETS:
        for word in (each.name, each.megatron_commit, each.mindspeed_commit, each.torch_npu):
            assert word in STEPS, word
    for line in npu_sets.NOT_TRIED:
        assert f"| {line.what} | {line.obstacle} |" in STEPS


def test_the_commands_install_the_default_set() -> None:
    default = npu_sets.DEFAULT
    blocks = "".join(re.findall(r"```bash\n(.*?)```", STEPS, re.DOTALL))
    for wanted in (
        f"torch=={default.torch[0]}+cpu", f"torch_npu=={default.torch_npu}",
        f"checkout {default.mindspeed_commit}", f"checkout {default.megatron_commit}",
        f"toolkit_{default.cann}_", f"--index-url {npu_sets.TORCH_INDEX}",
        f"triton-ascend=={npu_sets.TRITON} --extra-index-url={npu_sets.TRITON_INDEX}",
        *npu_install.SET_ENV[:1], npu_install.SET_ENV_ATB, npu_install.HCCN_TOOL,
        *npu_install.DEVICE_FILES, npu_install.DRIVER_VERSION,
    ):  # fmt: skip
        assert wanted in blocks, wanted


def test_a_name_without_a_row_is_found() -> None:
    assert unsourced("/usr/local/Ascend/elsewhere and torch 9.9.9") == {
        "/usr/local/Ascend/elsewhere", "9.9.9",
    }  # fmt: skip
