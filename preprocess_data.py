"""`python preprocess_data.py --input ... --output-prefix ...`: rows to a prompt data set."""

import sys

from mindspeed_rlxf.cli.preprocess import main

if __name__ == "__main__":
    sys.exit(main())
