"""PPO post-training of large language models with Megatron-core workers on Ray."""

import os

__version__ = "0.1.0"

# Where the NPU's library is installed, `import torch` loads it, in the driver too, and raises where
# CANN is not set up. Workers load it themselves, after they looked (device/npu.py).
os.environ.setdefault("TORCH_DEVICE_BACKEND_AUTOLOAD", "0")
