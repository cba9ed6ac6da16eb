"""Roles of PPO: actor, rollout, reference, critic, reward and scorer, as plain classes."""
