"""The rollout engine `vllm`: a vLLM server for each replica, in an environment of its own."""
