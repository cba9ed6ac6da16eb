"""No rank writes before the first rank has removed the files of an earlier export or save."""

import contextlib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist

from mindspeed_rlxf.engine import collective_errors, role_files, train_state
from mindspeed_rlxf.engine.engine import MegatronEngine


def test_ranks_meet_before_they_write(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """With `runtime: local` a rank of a later pipeline stage is often there first."""
    calls: list[str] = []
    rank = SimpleNamespace(rank=lambda: 0, size=lambda: 1)
    engine: Any = MegatronEngine.__new__(MegatronEngine)
    engine.groups = SimpleNamespace(dp_cp=rank, ep=rank, tp=rank, active=contextlib.nullcontext)
    engine.holding = lambda *parts: contextlib.nullcontext()
    engine.role, engine.source = SimpleNamespace(load="start"), tmp_path
    engine.weights = SimpleNamespace(export=lambda *args: calls.append("write"))
    monkeypatch.setattr(dist, "barrier", lambda: calls.append("meet"))
    monkeypatch.setattr(
        collective_errors, "gather_all", lambda items: calls.append("meet") or items
    )
    engine.export(tmp_path / "hf", None)
    assert calls == ["meet", "write", "meet"]


def test_ranks_meet_before_they_write_a_checkpoint(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """With `runtime: local` the first rank alone makes its folder, and may be the last there."""
    calls: list[str] = []
    state: Any = SimpleNamespace(
        groups=SimpleNamespace(active=contextlib.nullcontext), describe=None, saving=None
    )
    for name in ("_random_state", "_copy_share"):
        monkeypatch.setattr(train_state, name, lambda *_: [])
    monkeypatch.setattr(dist, "get_rank", lambda: 1)
    monkeypatch.setattr(dist, "barrier", lambda: calls.append("meet"))
    monkeypatch.setattr(role_files.WRITER, "submit", lambda *_: calls.append("write"))
    train_state.TrainState.begin_save(state, tmp_path)
    assert calls == ["meet", "write"]
