"""`python ray_gpt.py --config-name NAME [key=value ...]`: PPO training."""

import sys

from mindspeed_rlxf.cli.train import main

if __name__ == "__main__":
    sys.exit(main())
