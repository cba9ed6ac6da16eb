"""Real torch_npu wheels and MindSpeed sources have every name that our code uses.

RLXF_NPU_PACKAGES names wheels and source folders, separated as in PATH. They are read as text (zip
and ast), and never imported.
"""

import ast
import os
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

from mindspeed_rlxf.device.npu import ARGUMENTS

NAMED = [Path(p) for p in os.environ.get("RLXF_NPU_PACKAGES", "").split(os.pathsep) if p]
NONE = [pytest.param(None, marks=pytest.mark.skip(reason="RLXF_NPU_PACKAGES names no package"))]
DEVICE = Path(__file__).resolve().parents[3] / "mindspeed_rlxf" / "device"
# Modules that register the backend hccl; the second one in 26.1.0 and later.
REGISTRATION = ("torch_npu/__init__.py", "torch_npu/_init/registry/distributed.py")
Read = Callable[[str], str | None]  # path inside a wheel or folder -> text, None without the file


def find_used_names() -> tuple[set[str], set[str]]:
    """Return the names of `torch_npu.npu` and of `mindspeed.megatron_adaptor` in `device/`."""
    npu: set[str] = set()
    adaptor: set[str] = set()
    for file in DEVICE.glob("*.py"):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if not isinstance(node, ast.Attribute):
                continue
            owner = ast.unparse(node.value)
            if (file.stem == "npu" and owner == "npu") or owner in (
                "library", "getattr(torch, FACTS[kind].torch_type)"
            ):  # fmt: skip
                npu.add(node.attr)
            elif owner == "adaptor":
                adaptor.add(node.attr)
    return npu, adaptor


def reader(path: Path) -> Read:
    """Return a function that reads the files of a wheel or a folder."""

    def read(name: str) -> str | None:
        if path.is_dir():
            return (path / name).read_text(encoding="utf-8") if (path / name).is_file() else None
        with zipfile.ZipFile(path) as archive:
            return archive.read(name).decode() if name in archive.namelist() else None

    return read


def defined(read: Read, module: str) -> set[str]:
    """Return the names that a module defines or imports, those of star imports included."""
    name, found = module.replace(".", "/"), set[str]()
    text, package = read(f"{name}/__init__.py"), module
    if text is None:
        text, package = read(f"{name}.py"), module.rpartition(".")[0]
    for node in ast.parse(text or "").body:
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            found.add(node.name)
        elif isinstance(node, ast.Assign):
            found |= {t.id for t in node.targets if isinstance(t, ast.Name)}
        elif isinstance(node, ast.ImportFrom) and node.names[0].name == "*":
            above = f"{package}." if node.level else ""
            found |= defined(read, above + (node.module or ""))
        elif isinstance(node, ast.ImportFrom):
            found |= {alias.asname or alias.name for alias in node.names}
    return found


def wheel_problems(read: Read) -> list[str]:
    """Return what our code uses and this torch_npu lacks."""
    names, _ = find_used_names()
    problems = [f"torch_npu.npu.{n}" for n in sorted(names - defined(read, "torch_npu.npu"))]
    config = read("torch_npu/npu/npu_config.py") or ""
    found = [
        node
        for module in (config, read("torch_npu/npu/utils.py") or "")
        for node in ast.walk(ast.parse(module))
        if isinstance(node, ast.FunctionDef) and node.name == "set_compile_mode"
    ]
    arguments = [a.arg for f in found for a in (*f.args.args, *f.args.kwonlyargs)]
    if "jit_compile" not in arguments and not any(node.args.kwarg for node in found):
        problems.append("torch_npu.npu.set_compile_mode(jit_compile=...)")
    if not (read("torch_npu/contrib/transfer_to_npu.py") or ""):
        problems.append("torch_npu.contrib.transfer_to_npu")
    if not any(_registers_hccl(read(module) or "") for module in REGISTRATION):
        problems.append("the backend hccl")
    return problems


def _registers_hccl(text: str) -> bool:
    """Whether a module calls `register_backend("hccl", ...)`."""
    return any(
        isinstance(node, ast.Call)
        and ast.unparse(node.func).endswith("register_backend")
        and [each.value for each in node.args[:1] if isinstance(each, ast.Constant)] == ["hccl"]
        for node in ast.walk(ast.parse(text))
    )


def mindspeed_problems(root: Path) -> list[str]:
    """Return what our code uses and this MindSpeed lacks."""
    _, names = find_used_names()
    existing = defined(reader(root), "mindspeed.megatron_adaptor")
    problems = [f"mindspeed.megatron_adaptor.{n}" for n in sorted(names - existing)]
    texts = [f.read_text(encoding="utf-8") for f in (root / "mindspeed").rglob("*.py")]
    for name in sorted(ARGUMENTS):
        option = f"--{name.replace('_', '-')}"
        quoted = (f"'{name}'", f'"{name}"', f"args.{name}", f"'{option[2:]}'", f'"{option[2:]}"')
        if not any(word in text for text in texts for word in quoted):
            problems.append(f"the argument {name}")
    return problems


@pytest.mark.parametrize("package", NAMED or NONE, ids=str)
def test_real_packages_have_every_name_that_is_used(package):
    is_wheel = package.suffix == ".whl"
    assert (wheel_problems(reader(package)) if is_wheel else mindspeed_problems(package)) == []
