"""`torch_npu.profiler`: imported, and used by nothing that is rehearsed."""
