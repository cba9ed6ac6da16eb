"""Peak rate of a device by the name that its library gives it."""

from __future__ import annotations

import re

# Dense bf16 operations per second of one device. NVIDIA: data sheets of SXM models (A100 2021-06,
# H100 2023-04, H200 2024-03), sparse rates halved. 910B: JiusiServe/light-llm-simulator,
# conf/hardware_config.py at 5df25c7 (read 2026-11-23). 910_93: one die, arXiv:2506.12708, sec. 3.
PEAKS = (
    (r"ascend ?910b2", 353.8e12),
    (r"ascend ?910b3", 294.9e12),
    (r"ascend ?910b4", 245.7e12),
    (r"ascend ?910_93", 376e12),
    (r"\ba100\b", 312e12),
    (r"\bh[12]00\b(?!.*(pcie|nvl))", 989e12),
)


def find_peak(name: str) -> float | None:
    """Return the bf16 operations per second of a device; None where no figure is public.

    name: as `get_device_name` of its library gives it
    """
    found = (peak for pattern, peak in PEAKS if re.search(pattern, name.lower()))
    return next(found, None)
