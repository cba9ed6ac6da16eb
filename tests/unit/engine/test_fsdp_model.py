"""Models of transformers as FSDP's engine builds them."""

from pathlib import Path

import pytest
import torch

from mindspeed_rlxf.engine.fsdp import model as built
from mindspeed_rlxf.engine.fsdp.attention import Layout
from mindspeed_rlxf.models.parameters import Head
from tests.distributed.fsdp_models import make_family


@torch.no_grad()
def test_no_dropout_is_left_in_updates(tmp_path: Path) -> None:
    lm, _, _ = make_family(tmp_path, "opt")
    model = built.build(str(lm), Head.LANGUAGE_MODEL, torch.float32)
    model.to_empty(device="cpu")
    for parameter in model.parameters():
        parameter.normal_(std=0.2)
    ids = torch.arange(9)[None]
    one, other = (
        built._run(model.train(mode), ids, ids, Layout((9,)), torch.clone) for mode in (True, False)
    )
    assert torch.equal(one, other) and one.isfinite().all()


@pytest.mark.parametrize(("name", "packs"), [("phi3", False), ("opt", True)])
def test_longest_positions_keep_rows_apart(tmp_path: Path, name: str, packs: bool) -> None:
    lm, _, _ = make_family(tmp_path, name)
    model = built.build(str(lm), Head.LANGUAGE_MODEL, torch.float32)
    assert built.packs(model) is packs and built.runs_rows_alone(model) is not packs
