"""What torchrun's own tests ask of a script: prints on both streams, and ends as its first argument says."""

import os
import sys

print(f"out of rank {os.environ['RANK']}")
print(f"err of rank {os.environ['RANK']}", file=sys.stderr)
if sys.argv[1] == "raise":
    raise ValueError(f"rank {os.environ['RANK']} has had enough")
sys.exit(int(sys.argv[1]))
