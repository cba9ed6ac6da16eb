"""Advantages of long rows against a loop over their tokens."""

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from mindspeed_rlxf.algorithms import advantages
from mindspeed_rlxf.algorithms.advantages import BLOCK, discounted_sums, estimate_gae

WIDTH = BLOCK * BLOCK // 8 + 5


def looped(
    rewards: Tensor, values: Tensor, mask: Tensor, gamma: float, lam: float | Tensor
) -> tuple[Tensor, Tensor]:
    """Token after token from the last, all rows at once, in the precision of the rewards."""
    advantages = torch.zeros_like(rewards)
    following, next_values = torch.zeros_like(rewards[:, 0]), torch.zeros_like(rewards[:, 0])
    for slot in reversed(range(rewards.size(1))):
        here = mask[:, slot]
        delta = rewards[:, slot] + gamma * next_values - values[:, slot]
        following = torch.where(here, delta + gamma * lam * following, following)
        next_values = torch.where(here, values[:, slot], next_values)
        advantages[:, slot] = following
    advantages = advantages * mask
    return advantages, (advantages + values) * mask


def noise(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(3))


def masks() -> dict[str, Tensor]:
    prefix = torch.arange(WIDTH) < torch.tensor([[WIDTH], [1], [BLOCK + 1], [WIDTH - 3]])
    return {"prefix": prefix, "gaps": prefix & (noise(4, WIDTH) < 0.5)}


@pytest.mark.parametrize("kind", ["prefix", "gaps"])
@pytest.mark.parametrize(
    ("gamma", "lam"),
    [
        (1.0, 1.0),
        (0.999, torch.tensor([0.9999, 0.5, 0.0, 1.0])),
        (1.0, torch.tensor([0.95, 0.3, 1e-30, 0.99])),  # powers that underflow
    ],
)
def test_long_rows_are_within_a_rounding_of_the_loop_in_fp64(
    kind: str, gamma: float, lam: float | Tensor
) -> None:
    rewards, values, mask = noise(4, WIDTH), noise(4, WIDTH).flip(1), masks()[kind]
    wide = lam.double() if isinstance(lam, Tensor) else lam
    expected, _ = looped(rewards.double(), values.double(), mask, gamma, wide)
    advantages, returns = estimate_gae(rewards, values, mask, gamma, lam)
    long = mask.sum(1) > BLOCK
    assert int(long.sum()) >= 2
    assert_close(advantages[long].double(), expected[long], rtol=6e-8, atol=1e-12)
    assert_close(advantages[~long].double(), expected[~long], rtol=1e-4, atol=1e-5)
    assert torch.equal(returns, (advantages + values) * mask)


@pytest.mark.parametrize("lam", [0.95, torch.rand(6)])
def test_short_rows_have_the_bits_of_the_loop_whatever_stands_beside_them(
    lam: float | Tensor,
) -> None:
    rewards, values = noise(6, WIDTH), noise(6, WIDTH).flip(1)
    lengths = torch.tensor([[1], [2], [17], [BLOCK - 1], [BLOCK], [WIDTH]])
    mask = (torch.arange(WIDTH) < 2 * lengths) & (torch.arange(WIDTH) % 2 == 0)
    assert mask.sum(1).tolist() == [1, 2, 17, BLOCK - 1, BLOCK, (WIDTH + 1) // 2]
    expected = looped(rewards, values, mask, 0.97, lam)
    found = estimate_gae(rewards, values, mask, 0.97, lam)
    narrow = [x[:5, : 2 * BLOCK] for x in (rewards, values, mask)]
    alone = estimate_gae(*narrow, 0.97, lam[:5] if isinstance(lam, Tensor) else lam)  # type: ignore[arg-type]
    for mine, theirs, other in zip(found, expected, alone, strict=True):
        assert torch.equal(mine[:5], theirs[:5])
        assert torch.equal(mine[:5, : 2 * BLOCK], other)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_sums_over_many_levels_stay_within_the_stated_error(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Blocks of 4 places, so that 1000 places have five levels; fp32 is what an NPU has."""
    monkeypatch.setattr(advantages, "BLOCK", 4)
    inputs, factors = noise(3, 1000).to(dtype), torch.tensor([1.0, 0.97, 0.3], dtype=dtype)
    expected, size = torch.zeros(2, 3, 1001, dtype=torch.float64)
    for place in reversed(range(1000)):
        expected[:, place] = inputs[:, place] + factors.double() * expected[:, place + 1]
        size[:, place] = inputs[:, place].abs() + factors.double() * size[:, place + 1]
    error = (discounted_sums(inputs, factors).double() - expected[:, :1000]).abs()
    unit = torch.finfo(dtype).eps / 2
    assert bool((error <= 5 * (3 * 4 + 4) * unit * size[:, :1000]).all())
    assert float(error.max()) > 0
