"""Put the folders of examples on the path, because their scripts import each other by name."""

import sys
from pathlib import Path

for folder in ("tiny", "smollm2", "data_preprocess", "reward_model"):
    sys.path.insert(0, str(Path(__file__).parents[3] / "examples" / folder))
