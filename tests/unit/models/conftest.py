import torch

# Tensors here are tiny: threads that wait for each other on a busy machine cost seconds.
torch.set_num_threads(1)
