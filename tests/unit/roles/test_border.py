"""Roles use only the interface of the engine, and read no files."""

from __future__ import annotations

import pytest

from tests.unit.rollout.test_border import names_of
from tests.unit.test_layers import FILES, PACKAGE, imports_of, layer

BUILDS = f"{PACKAGE}.roles.engines"  # chooses the engine of a role
ROLES = [name for name in FILES if layer(name) == "roles" and name != BUILDS]
ENGINE = f"{PACKAGE}.engine"
SEAM = (f"{ENGINE}.train_engine",)
COMPUTES = ("megatron", "torch.distributed", f"{PACKAGE}.models", f"{PACKAGE}.device")
INSIDE = {"groups", "tp_group", "output_weight", "get_forward_backward_func", "all_reduce"}
STORES = ("os", "shutil", "io", "tempfile", f"{PACKAGE}.checkpoint")
FILE_VERBS = {"open", "exists", "mkdir", "iterdir", "glob", "rename", "unlink"}
FILE_VERBS |= {"read_text", "read_bytes", "write_text", "write_bytes"}


def begins(module: str, packages: tuple[str, ...]) -> bool:
    return any(module == package or module.startswith(f"{package}.") for package in packages)


@pytest.mark.parametrize("name", ROLES)
def test_a_role_knows_no_parallel_group_schedule_or_output_weight(name: str) -> None:
    imported = imports_of(name)
    beyond = {m for m in imported if m.startswith(f"{ENGINE}.") and not begins(m, SEAM)}
    assert not beyond | {m for m in imported if begins(m, COMPUTES)}
    assert not names_of(name) & INSIDE


@pytest.mark.parametrize("name", ROLES)
def test_a_role_touches_no_file(name: str) -> None:
    """A folder passes through it to the engine; agents of hosts see to files."""
    assert not {module for module in imports_of(name) if begins(module, STORES)}
    assert not names_of(name) & FILE_VERBS
