"""`python ray_gpt.py --config-name NAME [key=value ...]`: PPO training."""

import sys

from mindspeed_rlxf.ops.supervisor import supervise


def main() -> int:
    """Train, under the supervisor unless this process is its child."""
    code = supervise()
    if code is not None:
        return code
    from mindspeed_rlxf.cli.train import main as train  # in the process that trains: it is large

    return train()


if __name__ == "__main__":
    sys.exit(main())
