"""Where the data lies."""

import os
from pathlib import Path

DATA_DIR = Path(os.environ.get("TAU2_DATA_DIR") or Path(__file__).parents[1] / "data")
