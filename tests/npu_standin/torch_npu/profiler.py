"""`torch_npu.profiler`: imported, and not used by any rehearsal."""
