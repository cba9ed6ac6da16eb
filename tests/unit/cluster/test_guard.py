from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch

from mindspeed_rlxf.cluster.guard import check_report, find_array


@dataclass
class Report:
    losses: Any


@pytest.mark.parametrize(
    ("report", "place"),
    [
        (torch.zeros(1), "report (Tensor)"),
        ({"kl": [1.0, np.zeros(2)]}, "report['kl'][1] (ndarray)"),
        ((Report({"a": torch.tensor(1.0)}),), "report[0].losses['a'] (Tensor)"),
        ({"a": Report((1, {2: torch.zeros(1)}))}, "report['a'].losses[1][2] (Tensor)"),
    ],
)  # fmt: skip
def test_a_tensor_is_found_wherever_it_hides(report: Any, place: str) -> None:
    assert find_array(report) == place


def test_plain_values_pass() -> None:
    check_report({"a": [1, 2.5, "x", None, True], "b": Report((Role(),))}, "critic", "values")


class Role:
    """Some other object."""


def test_the_refusal_names_role_and_method() -> None:
    with pytest.raises(TypeError, match=r"critic\.values must report plain .* report\[0\]"):
        check_report([torch.zeros(1)], "critic", "values")
