"""docs/npu.md and the doctor name the same checks, each with a source."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

from mindspeed_rlxf.device import npu_versions

GUIDE = Path(__file__).parents[3] / "docs" / "npu.md"
TEXT = GUIDE.read_text(encoding="utf-8")
STEPS, _, SOURCES = TEXT.partition("\n## Sources\n")
STEPS = STEPS.partition("\n## Install\n")[2].partition("\n## What a process does\n")[0]
ROWS = [[cell.strip() for cell in line.strip("|").split(" | ")] for line in SOURCES.splitlines()]
ROWS = [row for row in ROWS if len(row) == 3 and not row[0].startswith(("what", "--"))]
NAMED = "\n".join(row[0] for row in ROWS)
CHECKER = Path(npu_versions.__file__).read_text(encoding="utf-8")
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


def test_every_row_has_what_where_and_when():
    assert len(ROWS) > 20
    for what, where, date in ROWS:
        assert what and where and re.fullmatch(r"20\d\d-\d\d-\d\d", date), what


def test_paths_versions_and_addresses_of_the_guide_have_a_source():
    assert unsourced(STEPS) == set()


def test_commands_of_the_guide_have_a_source():
    used = {Path(word).name for word in commands(STEPS)} - OWN
    assert {"npu-smi", "docker", "pip", "hccn_tool", "ray", "hf"} <= used, "blocks were not read"
    assert {word for word in used if not re.search(rf"\b{re.escape(word)} ", NAMED)} == set()


def test_paths_and_packages_of_the_doctor_have_a_source():
    texts = [
        node.value
        for node in ast.walk(ast.parse(CHECKER))
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    ]
    text = "\n".join(texts)  # its versions are compared with the guide's by other tests
    assert unsourced(text) <= {*VERSION.findall(text), *npu_versions.CANN_ROOTS}


def test_the_guide_and_the_doctor_name_the_same_checks():
    named = set(re.findall(r"`(npu\.[a-z_]+)`", STEPS))
    assert named == set(re.findall(r'"(npu\.[a-z_]+)"', CHECKER))


def test_the_guide_names_the_sets():
    for each in npu_versions.SETS:
        for word in (each.name, each.megatron_tag, each.mindspeed_branch, each.torch_npu):
            assert word in STEPS, word


def test_the_commands_install_the_default_set():
    default = npu_versions.DEFAULT
    blocks = "".join(re.findall(r"```bash\n(.*?)```", STEPS, re.DOTALL))
    for wanted in (
        f"torch=={default.torch[0]}+cpu", f"torch_npu=={default.torch_npu}",
        f"toolkit_{default.cann}_", f"--index-url {npu_versions.TORCH_INDEX}",
        f"triton-ascend=={npu_versions.TRITON} --extra-index-url={npu_versions.TRITON_INDEX}",
        *npu_versions.SET_ENV[:1], npu_versions.SET_ENV_ATB,
        *npu_versions.DEVICE_FILES, npu_versions.DRIVER_VERSION,
    ):  # fmt: skip
        assert wanted in blocks, wanted
