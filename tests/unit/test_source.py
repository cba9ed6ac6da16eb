"""Nothing in the package runs text as code, and every name that it reads exists."""

import ast
from collections.abc import Iterator
from pathlib import Path

import yaml

ROOT = Path(__file__).parents[2]
FILES = {
    ".".join(file.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): file
    for file in sorted((ROOT / "mindspeed_rlxf").rglob("*.py"))
}
RUNS_CODE = {"eval", "exec", "compile"}
# By their last part, however the module was imported: what unpickles, or hands a path to what does.
UNPICKLES = {
    *("Unpickler", "Unpickling", "dist_checkpointing", "load_common_state_dict", "open_memmap"),
    *("read_metadata", "FileSystemReader", "load_state_dict_from_file"),
}
MODULES = {"dill", "cloudpickle", "joblib", "shelve", "marshal", "_pickle", "pickletools"}
LOADS = ("torch", "pickle", "dcp", "dist_checkpointing", "checkpoint", "np", "numpy", "yaml", "jit")
# The restricted reader.
BASES = {"pickle.Unpickler", "Unpickler"}
ALLOWED = {
    *(
        ("mindspeed_rlxf.weights.pickled", name)
        for name in ("torch.load", "weights_only", "pickle.Unpickler")
    ),
    ("mindspeed_rlxf.weights.torch_dist", "read_metadata"),
    *(("mindspeed_rlxf.config.plugins", name) for name in ("compile", "exec")),  # a user's file
    ("mindspeed_rlxf.rewards.scoring", "pickle.loads"),  # what its parent process sends
    ("mindspeed_rlxf.cluster.ray.pool", "pickle.loads"),  # what the driver sends
}


def imports(node: ast.AST) -> Iterator[str]:
    """Names by which a loader could be reached under another name."""
    if isinstance(node, ast.Import):
        for alias in node.names:
            if alias.name.split(".")[0] in MODULES or (alias.name == "pickle" and alias.asname):
                yield alias.name
    if isinstance(node, ast.ImportFrom) and node.module:
        for alias in node.names:
            loads = alias.name in ("load", "loads", "Unpickler", "load_state_dict")
            if node.module.split(".")[0] in MODULES or (loads and node.module != "json"):
                yield f"{node.module}.{alias.name}"


def dangers(source: str) -> set[str]:
    """Calls that run what they read, by the name they are called by."""
    found = set()
    for node in ast.walk(ast.parse(source)):
        found |= set(imports(node))
        if isinstance(node, ast.ClassDef):
            found |= {name for base in node.bases if (name := ast.unparse(base)) in BASES}
        if not isinstance(node, ast.Call):
            continue
        name = ast.unparse(node.func)
        *module, last = name.split(".")
        loads = last in ("load", "loads", "unsafe_load") and module and module[-1] in LOADS
        if name in RUNS_CODE or last in UNPICKLES or loads:
            found.add(name)
        for keyword in node.keywords:
            if keyword.arg in ("weights_only", "allow_pickle"):
                found.add(keyword.arg)
            if keyword.arg == "trust_remote_code" and ast.unparse(keyword.value) != "False":
                found.add("trust_remote_code")
    return found


def test_no_text_or_file_is_run_as_code() -> None:
    texts = {name: file.read_text(encoding="utf-8") for name, file in FILES.items()}
    found = {(name, call) for name, text in texts.items() for call in dangers(text)}
    assert found - ALLOWED == set()
    assert [name for name, text in texts.items() if "weights_only=False" in text] == []


def test_every_fault_of_the_mutations_fits_the_code() -> None:
    """Code moves on; a fault whose text is gone is tried by nobody."""
    table = yaml.safe_load((ROOT / "tests/mutations/mutations.yaml").read_text(encoding="utf-8"))
    code = "\n".join(file.read_text(encoding="utf-8") for file in FILES.values())
    assert [fault["id"] for fault in table if code.count(fault["old"]) != 1] == []
