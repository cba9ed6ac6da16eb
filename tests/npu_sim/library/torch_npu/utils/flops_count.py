"""`torch_npu.utils.flops_count`: imported, and never called."""


class FlopsCounter:
    def __init__(self) -> None:
        raise NotImplementedError("the simulated torch_npu counts no operations")
