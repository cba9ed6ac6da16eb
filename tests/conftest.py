"""Settings of every test process."""

import os

import hypothesis
import torch

# The tests have clusters of their own, whatever Ray this user runs on this host.
os.environ.setdefault("RAY_ADDRESS", "local")

# The tests' matrices are tiny, and the machine is shared with the workers: threads only get in the
# way of each other.
torch.set_num_threads(1)

# How long an example takes says something about the machine, nothing about the code.
hypothesis.settings.register_profile("no deadline", deadline=None)
hypothesis.settings.load_profile("no deadline")
