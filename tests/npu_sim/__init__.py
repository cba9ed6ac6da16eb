"""A simulated NPU: a torch device named `npu` with its own memory, streams, HCCL and rules.

`build` compiles the device (`device/`). `library/` holds its torch_npu, `adaptor/` a MindSpeed of
few patches for tests without the real one; both go on the path of the processes that
`processes.environment` describes, and of nothing else. `rules` says what the device refuses.
"""
