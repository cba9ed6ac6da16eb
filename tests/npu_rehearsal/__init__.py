"""Rehearse PPO on NPUs on a CPU: run the real sources of MindSpeed and Megatron-LM on a torch_npu
that computes what the NPU's operators are documented to compute (`tests/npu_standin`)."""
