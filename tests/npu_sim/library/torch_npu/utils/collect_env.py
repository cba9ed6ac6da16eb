"""`torch_npu.utils.collect_env`."""


def get_cann_version() -> str:
    return "8.3.RC1"
