"""PPO over MindSpeed's own paths on CPU: real MindSpeed and Megatron-LM sources, and a torch_npu
that computes what the NPU's operators are documented to compute (`tests/npu_standin`)."""
