"""PPO post-training of large language models with Megatron-core workers on Ray."""

__version__ = "0.1.0"
