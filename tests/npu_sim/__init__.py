"""A simulated NPU: a torch device named `npu` with its own memory, streams, HCCL and rules.

`build` compiles the device from `device/`. `library/` has the torch_npu for it, `adaptor/` a small
replacement of MindSpeed for tests without the real one. Only processes with the environment of
`processes.environment` import these two. `rules` lists what the device refuses.
"""
