"""The scripts of a folder import each other by name, as they do when they are run."""

import sys
from pathlib import Path

for folder in ("tiny", "data_preprocess", "reward_model"):
    sys.path.insert(0, str(Path(__file__).parents[3] / "examples" / folder))
