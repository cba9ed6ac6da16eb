"""The mathematics of PPO as pure tensor functions."""
