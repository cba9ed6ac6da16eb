from __future__ import annotations

import ast
from pathlib import Path

import mindspeed_rlxf

PACKAGE = Path(mindspeed_rlxf.__file__).parent


def imports(path: Path) -> set[str]:
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found.add(node.module.split(".")[0])
    return found


def test_only_the_ray_files_of_the_runtime_import_ray() -> None:
    importers = {p.relative_to(PACKAGE) for p in PACKAGE.rglob("*.py") if "ray" in imports(p)}
    assert importers == {
        Path("runtime") / name
        for name in (
            "ray_agent.py",
            "ray_claim.py",
            "ray_cluster.py",
            "ray_pool.py",
            "ray_pools.py",
            "ray_probe.py",
            "ray_wait.py",
        )
    }
