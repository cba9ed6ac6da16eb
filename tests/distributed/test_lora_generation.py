"""Generation computes adapters as training does, so that no update is lost in bf16's rounding."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from mindspeed_rlxf.config.enums import Role
from mindspeed_rlxf.config.schema import RunConfig
from tests.distributed.adapter_gate import Gate
from tests.distributed.groups import build_group
from tests.distributed.llamas import TIED, make_llama, run_config, with_fsdp
from tests.distributed.samples import make_rollouts
from tests.distributed.test_layout_invariance import PP2, SP2

LORA = {"rank": 3, "alpha": 12.0}
WIDE = TIED.model_copy(update={"hidden_size": 64, "ffn_hidden_size": 96})
SIZES = 1e-5, 1e-4, 1e-3
"""Of the elements of B. Merged into bf16 weights of WIDE they left gaps of 6e-3, 1e-2 and 1.7e-2
between log-probs; rounding alone leaves 2e-3 to 5e-3 in steps, and in one pass up to 3e-4 (AVX2;
none with bf16 units)."""


def measured_gaps(
    runtime: Any, config: RunConfig, sizes: Sequence[float], owns: bool = False
) -> list[tuple[float, float]]:
    """Return the mean gaps of steps and of one pass, with adapters of each size; see `Gate`."""
    group = build_group(runtime, config.layout(Role.ACTOR_ROLLOUT), Gate, config, owns)
    report = next(filter(None, group.call(Gate.log_probs, make_rollouts(), [*sizes]).result()))
    gaps = []
    for log_probs in report:
        trained, drawn, scored = map(torch.tensor, log_probs)
        of_steps = float((trained - drawn).abs().mean())
        gaps.append((of_steps, float((trained - scored).abs().mean())))
    print("mean gaps with each size:", gaps)
    return gaps


def with_engine(config: RunConfig, engine: str, size: int) -> RunConfig:
    """Return a copy that generates with transformers, or with FSDP trains on `size` ranks too."""
    if engine == "fsdp":
        return with_fsdp(config, [Role.ACTOR_ROLLOUT], size)
    rollout = config.rollout.model_copy(update={"engine": engine})
    return config.model_copy(update={"rollout": rollout})


def check_gaps(runtime: Any, config: RunConfig, owns: bool = False) -> None:
    """Compare log-probs without an update, and with adapters of all SIZES."""
    unchanged, *updated = measured_gaps(runtime, config, (0.0, *SIZES), owns)
    limit, one_pass = (2e-2, 1e-3) if config.actor_rollout.bf16 else (1e-5, 1e-5)
    assert 0 < max(unchanged) < limit
    for size, (drawn, scored) in zip(SIZES, updated, strict=True):
        assert drawn < 2 * unchanged[0], size
        assert scored < 1.7 * unchanged[1] + one_pass, size


@pytest.mark.parametrize(
    ("engine", "layout", "owns"),
    [
        pytest.param("native", {}, False, id="shared"),
        pytest.param("native", {}, True, id="sent"),
        pytest.param("native", SP2, False, id="tp2"),
        pytest.param("native", SP2, True, id="tp2-sent", marks=pytest.mark.long),
        pytest.param("native", PP2, False, id="pp2", marks=pytest.mark.long),
        pytest.param("transformers", {}, False, id="transformers"),
        pytest.param("fsdp", {}, False, id="fsdp"),
    ],
)
def test_log_probs_of_generation_and_training_differ_by_rounding_alone(
    warm_runtime: Any, tmp_path: Path, engine: str, layout: dict[str, Any], owns: bool
) -> None:
    """However small the adapters: they differ as much as without an update."""
    make_llama(tmp_path, WIDE)
    size = 2 if layout or engine == "fsdp" else 1
    keys = {"bf16": True, **layout}
    config = run_config(tmp_path, tmp_path, WIDE, keys, size, actor_rollout={"lora": LORA})
    check_gaps(warm_runtime, with_engine(config, engine, size), owns)


@pytest.mark.parametrize("engine", ["native", "transformers", "fsdp"])
def test_an_fp32_head_rounds_no_logits(warm_runtime: Any, tmp_path: Path, engine: str) -> None:
    """In training as in generation; without it the logits are multiples of what bf16 can tell."""
    make_llama(tmp_path, WIDE)
    size = 2 if engine == "fsdp" else 1
    shares = []
    for fp32_head in (False, True):
        actor = {"lora": LORA, "fp32_head": fp32_head}
        keys = {"bf16": True}
        config = run_config(tmp_path, tmp_path, WIDE, keys, size, actor_rollout=actor)
        config = with_engine(config, engine, size)
        group = build_group(warm_runtime, config.layout(Role.ACTOR_ROLLOUT), Gate, config)
        firsts = group.call(Gate.first_log_probs, make_rollouts()).result()
        shares.append([on_grid(log_probs) for log_probs in next(filter(None, firsts))])
    rounded, exact = shares
    assert min(rounded) > 0.8
    assert max(exact) < 0.5


def on_grid(log_probs: list[list[float]]) -> float:
    """Return the share of differences between log-probs of one row that bf16 logits can have.

    A row has tokens drawn after one prompt, so the differences are those of their logits. These are
    multiples of 2^-12 in bf16, but for logits nearer to 0 than 2^-4.
    """
    after_one_prompt = torch.tensor(log_probs, dtype=torch.float64)
    steps = (after_one_prompt[:, 1:] - after_one_prompt[:, :1]) * 2**12
    differs = steps != 0  # another token
    return float(((steps - steps.round()).abs() < 0.04)[differs].double().mean())
