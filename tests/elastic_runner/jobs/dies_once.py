"""The first time, rank 1 is killed between two all_reduces; the next time each rank leaves a mark."""

import os
import signal
from pathlib import Path

import torch
import torch.distributed as dist

where, rank = Path(os.environ["TEST_DIR"]), int(os.environ["RANK"])
dist.init_process_group("gloo")
dist.all_reduce(torch.ones(1))
if rank == 1 and not (where / "died").exists():
    (where / "died").touch()
    os.kill(os.getpid(), signal.SIGKILL)
total = torch.ones(1)
dist.all_reduce(total)
(where / f"met.{rank}").write_text(str(total.item()))
dist.destroy_process_group()
