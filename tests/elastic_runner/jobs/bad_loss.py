"""DDP with a checkpoint every 2 steps, whose loss turns to NaN at step 7, and its weights with it: `bad_loss.py once|always one|all [5]`.

`once`: in generation 0 only; `one`: rank 1 alone says so, `all`: rank 0 alone says any loss. With a number the loss is said only every so
many steps, and one checkpoint is kept.
"""

import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from goodrun.checkpoint import Checkpointer

often, who, *rarely = sys.argv[1:]
said_every, keep = (int(rarely[0]), 1) if rarely else (1, 100)
dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(0)
inner = torch.nn.Linear(4, 1)
model = DistributedDataParallel(inner)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
checkpoints = Checkpointer(Path(os.environ["TEST_DIR"]) / "checkpoints", every=2, keep=keep, model=model, optimizer=optimizer)
step = checkpoints.restore()
while step < 40:
    loss = model(torch.ones(2, 4)).square().mean()
    bad = step + 1 >= 7 and (often == "always" or os.environ["GOODRUN_GENERATION"] == "0")
    optimizer.zero_grad()
    (loss * (float("nan") if bad else 1.0)).backward()
    optimizer.step()
    step += 1
    said = float("nan") if bad and (rank == 1 or who == "all") else loss.item() if not bad else 1.0
    checkpoints.step(step, loss=said if (who == "one" or rank == 0) and step % said_every == 0 else None)
    checkpoints.wait()
    dist.barrier()
checkpoints.close()
(Path(os.environ["TEST_DIR"]) / f"finite.{rank}").write_text(str(bool(inner.weight.isfinite().all())))
dist.destroy_process_group()
