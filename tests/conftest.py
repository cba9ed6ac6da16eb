"""Settings of every test process."""

import hypothesis
import torch

# The tests' matrices are tiny, and the machine is shared with the workers: threads only get in the
# way of each other.
torch.set_num_threads(1)

# How long an example takes says something about the machine, nothing about the code.
hypothesis.settings.register_profile("no deadline", deadline=None)
hypothesis.settings.load_profile("no deadline")
