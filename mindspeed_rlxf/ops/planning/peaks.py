"""Look up the peak rate of a device by the name that its library reports."""

from __future__ import annotations

import re

from mindspeed_rlxf.ops.planning.devices import TABLE

# Name in lower case -> row of the table. NVIDIA's cards for PCIe slots are clocked lower.
ROWS = {
    r"ascend ?910b2": "ascend-910b2",
    r"ascend ?910b3": "ascend-910b3",
    r"ascend ?910b4": "ascend-910b4",
    r"ascend ?910_93": "ascend-910_93",
    r"\ba100\b.*80gb(?!.*pcie)|\ba100-sxm4-80gb": "a100-80g",
    r"\bh100\b(?!.*(pcie|nvl))": "h100",
    r"\bh200\b(?!.*nvl)": "h200",
}


def find_peak(name: str) -> float | None:
    """Return the peak bf16 FLOP/s of a device; None if no pattern of ROWS matches its name.

    Of several patterns the first counts.
    name: as the library's `get_device_name` returns it; upper and lower case are the same
    """
    rows = (row for pattern, row in ROWS.items() if re.search(pattern, name.lower()))
    row = next(rows, None)
    return None if row is None else TABLE[row].bf16_tflops * 1e12
