"""Peak rate of a device by the name that its library gives it."""

from __future__ import annotations

import re

from mindspeed_rlxf.ops.planning.devices import TABLE

ROWS = (
    (r"ascend ?910b2", "ascend-910b2"),
    (r"ascend ?910b3", "ascend-910b3"),
    (r"ascend ?910b4", "ascend-910b4"),
    (r"ascend ?910_93", "ascend-910_93"),
    (r"\ba100\b", "a100-80g"),
    (r"\bh100\b(?!.*(pcie|nvl))", "h100"),
    (r"\bh200\b(?!.*(pcie|nvl))", "h200"),
)
"""Pattern of a name, in lower case, and the row of the table of devices that it means."""


def find_peak(name: str) -> float | None:
    """Return the bf16 operations per second of a device; None where no figure is public.

    name: as `get_device_name` of its library gives it
    """
    rows = (TABLE[row] for pattern, row in ROWS if re.search(pattern, name.lower()))
    found = next(rows, None)
    return None if found is None else found.bf16_tflops * 1e12
