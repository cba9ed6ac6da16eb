"""The PPO loop, its validation, the checks before a run and its end."""
