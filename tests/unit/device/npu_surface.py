"""Which names of torch_npu and MindSpeed our code uses, and whether real ones have them.

    python -m tests.unit.device.npu_surface torch_npu-*.whl MindSpeed/ ...

Wheels and source folders are read as text (zip and ast): nothing of them is imported.
"""

from __future__ import annotations

import ast
import sys
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path

DEVICE = Path(__file__).resolve().parents[3] / "mindspeed_rlxf" / "device"
# The second from 26.1.0 on.
REGISTRATION = ("torch_npu/__init__.py", "torch_npu/_init/registry/distributed.py")
Read = Callable[[str], str | None]  # path inside a wheel or a folder -> its text


def used() -> tuple[set[str], set[str]]:
    """Names of `torch_npu.npu` and of `mindspeed.megatron_adaptor` that `device/` uses."""
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


def arguments() -> set[str]:
    """Keys of `npu.ARGUMENTS`."""
    tree = ast.parse((DEVICE / "npu.py").read_text(encoding="utf-8"))
    for node in tree.body:
        if isinstance(node, ast.AnnAssign) and ast.unparse(node.target) == "ARGUMENTS":
            assert isinstance(node.value, ast.Dict)
            return {key.value for key in node.value.keys if isinstance(key, ast.Constant)}
    raise AssertionError("npu.py has no ARGUMENTS")


def wheel(file: Path) -> Read:
    def read(name: str) -> str | None:
        with zipfile.ZipFile(file) as archive:
            return archive.read(name).decode() if name in archive.namelist() else None

    return read


def folder(root: Path) -> Read:
    def read(name: str) -> str | None:
        file = root / name
        return file.read_text(encoding="utf-8") if file.is_file() else None

    return read


def defined(read: Read, module: str) -> set[str]:
    """Names at the top of a module, those of its star imports included."""
    name = module.replace(".", "/")
    text, package = read(f"{name}/__init__.py"), module
    if text is None:
        text, package = read(f"{name}.py"), module.rpartition(".")[0]
    return set(_defined(read, ast.parse(text), package)) if text is not None else set()


def _defined(read: Read, tree: ast.Module, package: str) -> Iterator[str]:
    for node in tree.body:
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            yield node.name
        elif isinstance(node, ast.Assign):
            yield from (t.id for t in node.targets if isinstance(t, ast.Name))
        elif isinstance(node, ast.ImportFrom):
            for alias in node.names:
                if alias.name == "*":
                    above = f"{package}." if node.level else ""
                    yield from defined(read, above + (node.module or ""))
                else:
                    yield alias.asname or alias.name


def wheel_problems(read: Read) -> list[str]:
    """What our code uses and this torch_npu lacks."""
    names, _ = used()
    problems = [f"torch_npu.npu.{n}" for n in sorted(names - defined(read, "torch_npu.npu"))]
    config = read("torch_npu/npu/npu_config.py") or ""
    found = [
        node
        for module in (config, read("torch_npu/npu/utils.py") or "")
        for node in ast.walk(ast.parse(module))
        if isinstance(node, ast.FunctionDef) and node.name == "set_compile_mode"
    ]
    if not any(_takes(node, "jit_compile") for node in found):
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


def _takes(node: ast.FunctionDef, name: str) -> bool:
    listed = [*node.args.args, *node.args.kwonlyargs]
    return node.args.kwarg is not None or name in {a.arg for a in listed}


def mindspeed_problems(root: Path) -> list[str]:
    """What our code uses and this MindSpeed lacks."""
    _, names = used()
    read = folder(root)
    there = defined(read, "mindspeed.megatron_adaptor")
    problems = [f"mindspeed.megatron_adaptor.{n}" for n in sorted(names - there)]
    texts = [f.read_text(encoding="utf-8") for f in (root / "mindspeed").rglob("*.py")]
    for name in sorted(arguments()):
        option = f"--{name.replace('_', '-')}"
        quoted = (f"'{name}'", f'"{name}"', f"args.{name}", f"'{option[2:]}'", f'"{option[2:]}"')
        if not any(word in text for text in texts for word in quoted):
            problems.append(f"the argument {name}")
    return problems


def problems(path: Path) -> list[str]:
    return wheel_problems(wheel(path)) if path.suffix == ".whl" else mindspeed_problems(path)


if __name__ == "__main__":
    npu, adaptor = used()
    print("torch_npu.npu:", *sorted(npu))
    print("mindspeed.megatron_adaptor:", *sorted(adaptor), "with", *sorted(arguments()))
    missing = {argument: problems(Path(argument)) for argument in sys.argv[1:]}
    for name, lacking in missing.items():
        print(f"{Path(name).name}: {'lacks ' + ', '.join(lacking) if lacking else 'has them all'}")
    sys.exit(any(missing.values()))
