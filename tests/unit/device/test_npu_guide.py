"""docs/npu.md and the doctor name the same checks and versions."""

import re
from pathlib import Path

from mindspeed_rlxf.device import npu_versions

TEXT = (Path(__file__).parents[3] / "docs" / "npu.md").read_text(encoding="utf-8")
STEPS = TEXT.partition("\n## Install\n")[2].partition("\n## What a process does\n")[0]
CHECKER = Path(npu_versions.__file__).read_text(encoding="utf-8")


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
