"""MindSpeed-LLM: the YAML of its Ray PPO, and the flags of its scripts."""
