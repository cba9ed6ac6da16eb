"""Peak speed of devices, by the names that their drivers give them."""

import re

# Pattern of the name in lower case -> dense bf16 TFLOPS. NVIDIA's PCIe cards are clocked lower.
# Ascend 910B: JiusiServe/light-llm-simulator, conf/hardware_config.py at 5df25c7; 910_93 is a die
# of the A3: arXiv:2506.12708, section 3. NVIDIA: data sheets of the SXM cards.
PEAK_TFLOPS = {
    r"ascend ?910b2": 353.8,
    r"ascend ?910b3": 294.9,
    r"ascend ?910b4": 245.7,
    r"ascend ?910_93": 376,
    r"\ba100\b.*80gb(?!.*pcie)|\ba100-sxm4-80gb": 312,
    r"\bh100\b(?!.*(pcie|nvl))": 989,
    r"\bh200\b(?!.*nvl)": 989,
}


def find_peak(name: str) -> float | None:
    """Return a device's peak bf16 FLOP/s; None if unknown."""
    found = (peak for pattern, peak in PEAK_TFLOPS.items() if re.search(pattern, name.lower()))
    return next((peak * 1e12 for peak in found), None)
