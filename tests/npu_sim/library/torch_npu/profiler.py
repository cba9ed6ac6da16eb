"""`torch_npu.profiler`: imported, and never called."""
