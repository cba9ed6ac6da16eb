"""`python convert_ckpt.py --load-model-type hf --save-model-type mg ...`: weights to a layout."""

import sys

from mindspeed_rlxf.cli.convert import main

if __name__ == "__main__":
    sys.exit(main())
