"""Tests that run in a process with simulated NPUs, started by `tests/npu_sim/test_inside.py`."""
