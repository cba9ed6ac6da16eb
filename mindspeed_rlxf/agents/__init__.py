"""Agents: conversations of several turns with tools, sampled by a rollout engine."""
