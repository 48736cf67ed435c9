"""Prints on both streams and writes its whole environment into TEST_DIR."""

import json
import os
import sys
from pathlib import Path

rank = os.environ["RANK"]
print(f"out of rank {rank}: {sys.argv[1:]}")
print(f"err of rank {rank}", file=sys.stderr)
Path(os.environ["TEST_DIR"], f"environment.{rank}").write_text(json.dumps(dict(os.environ)))
