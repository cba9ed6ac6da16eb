"""Find out whether bubblewrap works on this host, for tests of both kinds of host."""

import pytest

from mindspeed_rlxf.config.problems import UserError
from mindspeed_rlxf.config.reward_section import SandboxConfig
from mindspeed_rlxf.rewards.sandbox import Sandbox


def open_sandbox(config: SandboxConfig) -> Sandbox:
    """Return a sandbox that isolates programs; skip the test where bubblewrap does not work."""
    try:
        return Sandbox.choose(config)
    except UserError as error:
        pytest.skip(str(error))


def has_bubblewrap() -> bool:
    try:
        Sandbox.choose(SandboxConfig())
    except UserError:
        return False
    return True
