"""Tests of a process with simulated NPUs, which `tests/npu_sim/test_inside.py` starts."""
