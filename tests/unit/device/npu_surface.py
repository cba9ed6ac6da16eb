"""Check that releases of torch_npu and MindSpeed have the names that our code uses.

    python -m tests.unit.device.npu_surface torch_npu-*.whl MindSpeed/ ...

Wheels and source folders are read as text (zip and ast), and never imported. Prints what each one
lacks; exits with 1 where one lacks a name.
"""

import ast
import sys
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path

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


def find_arguments() -> set[str]:
    """Return the keys of `npu.ARGUMENTS`, which MindSpeed has to know as arguments."""
    tree = ast.parse((DEVICE / "npu.py").read_text(encoding="utf-8"))
    for node in tree.body:
        if isinstance(node, ast.AnnAssign) and ast.unparse(node.target) == "ARGUMENTS":
            assert isinstance(node.value, ast.Dict)
            return {key.value for key in node.value.keys if isinstance(key, ast.Constant)}
    raise AssertionError("npu.py has no ARGUMENTS")


def wheel(file: Path) -> Read:
    """Return a reader of the files of a wheel."""

    def read(name: str) -> str | None:
        with zipfile.ZipFile(file) as archive:
            return archive.read(name).decode() if name in archive.namelist() else None

    return read


def folder(root: Path) -> Read:
    """Return a reader of the files of a folder."""

    def read(name: str) -> str | None:
        file = root / name
        return file.read_text(encoding="utf-8") if file.is_file() else None

    return read


def defined(read: Read, module: str) -> set[str]:
    """Return the names that a module defines or imports, with those of its star imports.

    Returns an empty set where the module does not exist.
    """
    name = module.replace(".", "/")
    text, package = read(f"{name}/__init__.py"), module
    if text is None:
        text, package = read(f"{name}.py"), module.rpartition(".")[0]
    return set(_defined(read, ast.parse(text), package)) if text is not None else set()


def _defined(read: Read, tree: ast.Module, package: str) -> Iterator[str]:
    """Yield the names of a parsed module; relative star imports are looked up in `package`."""
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
    """Whether a function accepts the argument."""
    listed = [*node.args.args, *node.args.kwonlyargs]
    return node.args.kwarg is not None or name in {a.arg for a in listed}


def mindspeed_problems(root: Path) -> list[str]:
    """Return what our code uses and this MindSpeed lacks."""
    _, names = find_used_names()
    existing = defined(folder(root), "mindspeed.megatron_adaptor")
    problems = [f"mindspeed.megatron_adaptor.{n}" for n in sorted(names - existing)]
    texts = [f.read_text(encoding="utf-8") for f in (root / "mindspeed").rglob("*.py")]
    for name in sorted(find_arguments()):
        option = f"--{name.replace('_', '-')}"
        quoted = (f"'{name}'", f'"{name}"', f"args.{name}", f"'{option[2:]}'", f'"{option[2:]}"')
        if not any(word in text for text in texts for word in quoted):
            problems.append(f"the argument {name}")
    return problems


def problems(path: Path) -> list[str]:
    """Return what a wheel of torch_npu (.whl) or a folder of MindSpeed lacks."""
    return wheel_problems(wheel(path)) if path.suffix == ".whl" else mindspeed_problems(path)


if __name__ == "__main__":
    npu, adaptor = find_used_names()
    print("torch_npu.npu:", *sorted(npu))
    print("mindspeed.megatron_adaptor:", *sorted(adaptor), "with", *sorted(find_arguments()))
    missing = {argument: problems(Path(argument)) for argument in sys.argv[1:]}
    for name, lacking in missing.items():
        print(f"{Path(name).name}: {'lacks ' + ', '.join(lacking) if lacking else 'has them all'}")
    sys.exit(any(missing.values()))
