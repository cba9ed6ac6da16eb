"""Settings of every test process."""

import torch

# The tests' matrices are tiny, and the machine is shared with the workers: threads only get in the
# way of each other.
torch.set_num_threads(1)
