"""Modules of Megatron cannot import trackers; all other modules can."""

import sys

import pytest

from mindspeed_rlxf.device.megatron_imports import hide_trackers

IMPORT = "import wandb\nfound = wandb.HERE"


def test_only_megatron_misses_the_trackers(tmp_path, monkeypatch):
    """A module is known by its name, so lines that run under Megatron's stand for it."""
    (tmp_path / "wandb.py").write_text("HERE = True\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "wandb", raising=False)
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))
    before = len(sys.meta_path)
    hide_trackers()
    hide_trackers()
    assert len(sys.meta_path) <= before + 1
    with pytest.raises(ModuleNotFoundError, match="wandb is hidden from Megatron"):
        exec(IMPORT, {"__name__": "megatron.core.timers"})
    other = {"__name__": "megatron_of_a_user"}
    exec(IMPORT, other)
    monkeypatch.delitem(sys.modules, "wandb")
    assert other["found"]
