"""Megatron: parallel groups, micro-batches, schedule, optimizer, forward-only passes."""
