"""The PPO loop, validation, and everything that is decided before and after it."""
